"""RMS norm over the hidden size; every rank holds it whole."""

from collections.abc import Iterator

from torch import Tensor

from worker_svc.layers.parameter import Parameter, whole


class Norm:
    def __init__(self, name: str, size: int, eps: float) -> None:
        self._name = name
        self._size = size
        self.eps = eps
        self.weight: Tensor

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter((whole(self._name, self._size),), lambda ops, t: setattr(self, "weight", t))
