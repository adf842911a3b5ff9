"""Rotary tables in fp32, one row a position.

Knows the frequencies of each kind, as transformers computes them. Rows are computed in runs of a fixed number, since
the vector library's cosine may differ in the last bit from its scalar one: a row's bits do not depend on how many rows
are asked for.
"""

import math

import torch
from torch import Tensor

from worker_svc.spec import RopeSpec

RUN = 1024


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[E / 2] fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    frequencies: Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [P, E / 2] fp32, P rounded up to whole runs."""
    frequencies = inverse_frequencies(rope, head_dim)
    cos, sin = [], []
    for start in range(0, max(1, num_positions), RUN):
        angles = torch.arange(start, start + RUN).to(torch.float32)[:, None] * frequencies
        cos.append(angles.cos() * rope.attention_factor)
        sin.append(angles.sin() * rope.attention_factor)
    return torch.cat(cos), torch.cat(sin)


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    longest = rope.original_length / rope.low_freq_factor
    shortest = rope.original_length / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    medium = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(medium, between, slowed)


def _yarn(rope: RopeSpec, head_dim: int, periods: Tensor) -> Tensor:
    """Peng et al. 2023: a ramp over dimensions from extrapolation (fast) to interpolation (slow)."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * periods)) * (1 - kept) + (1.0 / periods) * kept
