"""The self-test: does this machine's own arithmetic keep the promises of numerics `invariant`?

Knows how to ask the libraries and which paths to try. Whether a matmul's row keeps its bits alone, among others, in a
shard of the columns and with fewer threads depends on library, instruction set and torch version; nothing is assumed.
Invariant: a `Numerics` that `probe` returns passed every question asked here, on this machine, in this process.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from worker_svc.ops.matmul import CpuWeight, Library, MatmulPath, matmul, onednn_available, own_product, prepare

ROWS = (1, 2, 3, 5, 9, 16, 17, 33, 48, 300)
SHAPES = ((576, 192), (1536, 96), (200, 328), (64, 384), (128, 320))  # (K, N)
SHARDS = ((0, 96), (48, 96), (32, 64), (17, 1), (40, 24))
MULTIPLES = (1, 2, 4, 8, 16)
TILES = (32, 16, 8)
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class NotInvariant(RuntimeError):
    """No path on this machine keeps a promise of numerics `invariant`; `fast` is what can be served here."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the self-test chose: part of the fingerprint."""

    matmul: MatmulPath
    attention_rows: int  # query rows are padded to a multiple of it
    attention_tiles: bool  # whether prefill may attend many queries in one product
    across_tp: bool = True  # whether a shard of the columns gives the bits of the whole
    row_steps: Literal["compiled", "torch"] = "torch"  # norms, rotation, activation and attention
    tied_head: MatmulPath | None = None  # of a head that is the embedding too and not held twice; None: as `matmul`
    leaves: bool = True  # row-parallel sums by leaves; False (`fast`): one product a rank, the library's all-reduce

    def __str__(self) -> str:
        tiles = "" if self.attention_tiles else "-single"
        steps = "compiled" if self.row_steps == "compiled" else f"torch-rows{self.attention_rows}{tiles}"
        head = "" if self.tied_head in (None, self.matmul) else f"/tied-{self.tied_head}"
        return f"{self.matmul}/{steps}{head}" + ("" if self.across_tp else "/one-tp")


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what sums and elementwise steps are done."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _most_threads() -> int:
    """At least two, so that a worker with one thread chooses the paths, and tells the fingerprint, of one with two."""
    return max(2, torch.get_num_threads())


class _threads_restored(ContextDecorator):
    """Every question tries several thread counts, and must leave the next one the count that it found."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


@cache
def probe(dtype: torch.dtype) -> Numerics:
    """Choose paths for weights of this type. Raises NotInvariant. Takes under 0.3 s on two cores; cached."""
    with torch.inference_mode():
        path = next((path for path in _candidates(dtype) if matmul_is_invariant(dtype, path)), None)
        across_tp = path is not None
        if path is None and dtype == torch.float64:  # for tests: their tolerance across tp is 1e-12, not 0
            path = next((path for path in _candidates(dtype) if matmul_is_invariant(dtype, path, shards=())), None)
        if path is None:
            raise NotInvariant(f"no matmul path keeps the bits of a row in {dtype} on this machine")
        if _compiled_serves(dtype):
            # Compiled loops state their order themselves; there is nothing to ask.
            return Numerics(path, 1, True, across_tp, "compiled", _tied(path, dtype))
        rows, tiles = _attention(accumulator(dtype))
        for name, holds in _elementwise(dtype).items():
            if not holds:
                raise NotInvariant(f"{name} depends on its neighbours in {dtype} on this machine")
    return Numerics(path, rows, tiles, across_tp, tied_head=_tied(path, dtype))


def _tied(path: MatmulPath, dtype: torch.dtype) -> MatmulPath:
    """The path of a head that is the embedding too: oneDNN's reordered weight has no rows to be read."""
    if path.library != "packed":
        return path
    others = (other for other in _candidates(dtype) if other.library != "packed")
    return next((other for other in others if matmul_is_invariant(dtype, other)), path)


@cache
def fastest(dtype: torch.dtype) -> Numerics:
    """Numerics `fast`: what is quickest here, K whole on each rank; nothing is promised of its bits."""
    steps: Literal["compiled", "torch"] = "compiled" if _compiled_serves(dtype) else "torch"
    if steps == "compiled" and not _library_is_faster(dtype):
        path = MatmulPath("fma")
        return Numerics(path, 4, True, False, steps, path, leaves=False)
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(2048, 1024, generator=generator).to(dtype)
    x = torch.randn(1, 1024, generator=generator).to(dtype)
    took: dict[MatmulPath, float] = {}
    with torch.inference_mode():
        for library in _libraries(dtype):
            path = MatmulPath(library)
            weight = prepare(w.clone(), None, path)
            for _ in range(8):
                start = time.perf_counter()
                matmul(x, weight)
                took[path] = min(took.get(path, math.inf), time.perf_counter() - start)
    ranked = sorted(took, key=lambda path: took[path])
    tied = next((path for path in ranked if path.library != "packed"), ranked[0])
    return Numerics(ranked[0], 4, True, False, steps, tied, leaves=False)


def _compiled_serves(dtype: torch.dtype) -> bool:
    """Whether norms, rotation, activation, attention and products may be our own compiled loops."""
    return dtype in (torch.float32, torch.bfloat16) and own_product() is not None


def _library_is_faster(dtype: torch.dtype) -> bool:
    """Matrix units multiply bfloat16 several times faster than fp32 units can; only the library uses them."""
    from worker_svc.ops.native import has_feature

    return dtype == torch.bfloat16 and has_feature("amx-bf16")


def _libraries(dtype: torch.dtype) -> tuple[Library, ...]:
    return ("packed", "onednn", "blas") if onednn_available(dtype) else ("blas",)


def _candidates(dtype: torch.dtype) -> Iterator[MatmulPath]:
    """In the order in which they are tried: a fact of the machine, never of timing."""
    if _compiled_serves(dtype):
        yield MatmulPath("fma")
    libraries = _libraries(dtype)
    for library in libraries:
        for multiple in MULTIPLES[:2]:
            yield MatmulPath(library, multiple)
    for library in libraries:
        for multiple in MULTIPLES[2:]:
            yield MatmulPath(library, multiple)
    for library in libraries:
        for tile in TILES:
            yield MatmulPath(library, tile, row_tile=tile)


@_threads_restored()
def matmul_is_invariant(
    dtype: torch.dtype,
    path: MatmulPath,
    product: Callable[[Tensor, CpuWeight], Tensor] = matmul,
    shards: tuple[tuple[int, int], ...] = SHARDS,
) -> bool:
    """Rows alone and among others, at any offset, in shards of the columns, with one thread and with all."""
    threads = _most_threads()
    generator = torch.Generator().manual_seed(1)
    for k, n in SHAPES:
        x = torch.randn(max(ROWS), k, generator=generator).to(dtype)
        w = torch.randn(n, k, generator=generator).to(dtype)
        whole = prepare(w, None, path)
        torch.set_num_threads(threads)
        expected = product(x, whole)
        for count in dict.fromkeys((threads, 1)):
            torch.set_num_threads(count)
            for rows in ROWS:
                if not same_bits(product(x[:rows], whole), expected[:rows]):
                    return False
            if not same_bits(product(x[7:40], whole), expected[7:40]):
                return False
            for begin, width in shards:
                part = prepare(w[begin : begin + width].contiguous(), None, path)
                if begin + width <= n and not same_bits(product(x[:20], part), expected[:20, begin : begin + width]):
                    return False
    return True


def _attention(dtype: torch.dtype) -> tuple[int, bool]:
    """Padding of query rows, and whether a tall tile gives the bits of single queries."""
    for multiple in MULTIPLES[2:]:
        if _attention_rows_agree(dtype, multiple, (multiple, 2 * multiple, 3 * multiple, 96, 128)):
            return multiple, True
    for multiple in MULTIPLES[2:]:
        if _attention_rows_agree(dtype, multiple, (multiple,)):
            return multiple, False
    raise NotInvariant(f"batched products depend on the batch in {dtype} on this machine")


@_threads_restored()
def _attention_rows_agree(dtype: torch.dtype, multiple: int, heights: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(2)
    threads = _most_threads()
    for head_dim in (16, 64, 128):
        q = torch.randn(6, max(heights), head_dim, generator=generator).to(dtype)
        k = torch.randn(6, 256, head_dim, generator=generator).to(dtype)
        weights = torch.rand(6, max(heights), 256, generator=generator).to(dtype)
        expected = None
        for count in dict.fromkeys((threads, 1)):
            torch.set_num_threads(count)
            for items in (6, 1, 3):
                for rows in sorted(heights, reverse=True):
                    scores = torch.bmm(q[:items, :rows], k[:items].transpose(1, 2))
                    values = torch.bmm(weights[:items, :rows].contiguous(), k[:items])
                    sums = weights[:items, :rows].contiguous().sum(-1)
                    if expected is None:
                        expected = scores, values, sums
                    for got, wanted in zip((scores, values, sums), expected, strict=True):
                        if not same_bits(got, wanted[:items, :rows]):
                            return False
    return True


@_threads_restored()
def _elementwise(dtype: torch.dtype) -> dict[str, bool]:
    """Norm, activation and exponential: a row alone against the row among others, over odd widths and both threads."""
    generator = torch.Generator().manual_seed(3)
    acc = accumulator(dtype)
    threads = _most_threads()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "the norm": lambda x: rms_norm(x.to(dtype), torch.ones(x.shape[-1], dtype=dtype), 1e-5),
        "the activation": lambda x: silu_mul(torch.cat((x, x), -1).to(dtype), acc),
        "exp": lambda x: x.to(acc).exp(),
    }
    holds = dict.fromkeys(functions, True)
    for width in (96, 577, 1536):
        x = torch.randn(300, width, generator=generator)
        for name, function in functions.items():
            torch.set_num_threads(threads)
            expected = function(x)
            for count in dict.fromkeys((threads, 1)):
                torch.set_num_threads(count)
                for rows in (1, 3, 33, 300):
                    holds[name] &= same_bits(function(x[:rows]), expected[:rows])
                holds[name] &= same_bits(function(x[7:12]), expected[7:12])
    return holds


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def silu_mul(gate_up_TI: Tensor, acc: torch.dtype) -> Tensor:
    """silu(gate) * up in the accumulator's type, rounded once.

    Not F.silu: its bits differ between the vector body and the tail.
    """
    gate, up = gate_up_TI.chunk(2, -1)
    gate = gate.to(acc)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TI.dtype)
