"""How a layer says what it holds: parts of checkpoint tensors, laid one under the other.

Sharding is declared here, where a layer is defined; loading only obeys. Does not know files or devices. Invariant: the
names that all ranks declare together are exactly the architecture's tensors, and a rank reads nothing it does not keep.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.ops.base import Ops


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices `part` along `dim` of the checkpoint tensor `name`, whose full shape is `shape`."""

    name: str
    shape: tuple[int, ...]
    part: range
    dim: int = 0

    @property
    def kept_shape(self) -> tuple[int, ...]:
        kept = list(self.shape)
        kept[self.dim] = len(self.part)
        return tuple(kept)


def whole(name: str, *shape: int) -> Slice:
    return Slice(name, shape, range(shape[0]))


@dataclass(frozen=True, slots=True)
class Parameter:
    """Slices concatenated along dimension 0, and what becomes of the tensor that they make."""

    slices: tuple[Slice, ...]
    bind: Callable[[Ops, Tensor], None]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(s.kept_shape[0] for s in self.slices)
        return (rows, *self.slices[0].kept_shape[1:])


class Layer(Protocol):
    def parameters(self) -> Iterator[Parameter]: ...
