"""Weights of a seeded random model, made on the device from a config alone: for measuring at real shapes.

Knows how a tensor of a name is drawn; does not know architectures. Invariant: a tensor depends on the seed, its name
and the kind of device, so shards of any number of ranks are cut from the same tensors.

The head is widened: its rows differ in scale, so that logits are peaked and the likeliest token is clear of the second
by more than the roundings of a forward pass, as in a trained model.
"""

import zlib

import torch
from torch import Tensor

from worker_svc.layers.parameter import Parameter, Slice

DEVIATION = 0.02
WIDENING = 0.5  # of the logarithm of a head row's scale


def draw(name: str, shape: tuple[int, ...], seed: int, device: torch.device, *, widened: bool = False) -> Tensor:
    """One whole tensor in bfloat16: ones for norms, zeros for biases, else normal."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed((seed << 32) + zlib.crc32(name.encode()))
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, DEVIATION, generator=generator)
    if widened:
        scales = torch.empty(shape[0], 1, device=device).normal_(0, WIDENING, generator=generator).exp_()
        tensor.mul_(scales.to(tensor.dtype))
    return tensor


class RandomReader:
    """Reads what a `Reader` reads, from no file."""

    bytes_read = 0

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, head: str) -> None:
        self._seed, self._dtype, self._device, self._head = seed, dtype, device, head

    def read(self, parameter: Parameter) -> Tensor:
        return torch.cat([self._slice(part) for part in parameter.slices]).to(self._dtype)

    def _slice(self, part: Slice) -> Tensor:
        tensor = draw(part.name, part.shape, self._seed, self._device, widened=part.name == self._head)
        return tensor.narrow(part.dim, part.part.start, len(part.part))

    def close(self) -> None:
        pass
