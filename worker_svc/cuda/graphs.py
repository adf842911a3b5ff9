"""A step captured as a CUDA graph, one a bucket, all from one pool of memory.

Knows what a step launches, from unpacking its message to advancing the step counter, and which bucket serves which
step.
A bucket bounds the launch, not the work: kernels read the step's counts from the device, so a step in a larger bucket
costs a few empty programs and has the same bits. Decode buckets serve steps in which every row has one new token, mixed
buckets all others.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.cuda import attention
from worker_svc.cuda.ops import CudaInputs, CudaOps, Extent
from worker_svc.cuda.sampler import Draws, draw
from worker_svc.cuda.step_state import StepState
from worker_svc.kv_cache import KVCache
from worker_svc.models.decoder import Decoder
from worker_svc.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Bucket:
    """size: rows of a decode bucket, tokens of a mixed one. shared: a decode that reads shared splits once."""

    size: int
    mixed: bool = False
    shared: bool = False


class Launch(Protocol):
    def __call__(self) -> tuple[Tensor, Tensor]:
        """Start the step of the next message; normed hidden states [T, D] and logits [R, V], valid until the next."""
        ...


@dataclass(frozen=True, slots=True)
class Replay:
    """A graph and the tensors that hold its results."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    logits: Tensor

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.graph.replay()
        return self.hidden, self.logits


def _nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph that was kept: kernels and copies."""
    count = ctypes.c_size_t()
    failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    assert not failed, f"cuGraphGetNodes answered {failed}"
    return count.value


def decode_buckets(max_rows: int) -> list[int]:
    """Powers of two, and the bound itself."""
    return sorted({*(1 << i for i in range(max_rows.bit_length()) if 1 << i < max_rows), max_rows})


def mixed_buckets(max_rows: int, max_tokens: int) -> list[int]:
    """Powers of two from 128 up, and the bound itself."""
    return sorted({*(1 << i for i in range(7, max_tokens.bit_length()) if 1 << i < max_tokens), max_tokens})


class StepGraphs:
    """Args:
    model: loaded with `CudaOps`.
    state: where messages arrive; its sizes bound every step.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, group: Group, state: StepState, work: attention.Work, draws: Draws,
        max_position: int,
    ) -> None:  # fmt: skip
        assert isinstance(model.ops, CudaOps)
        self._model, self._ops, self._cache, self._group = model, model.ops, cache, group
        self._state, self._work, self._draws = state, work, draws
        self._extent = Extent(max_position)
        sizes = state.sizes
        self._decode = decode_buckets(sizes.rows)
        self._mixed = mixed_buckets(sizes.rows, sizes.tokens)
        self._launches: dict[Bucket, Launch] = {}
        self.kernels_a_step = 0  # nodes of the graph of one decoding row, once captured

    def run(self, of: Bucket) -> tuple[Tensor, Tensor]:
        """Launch the step that the next message describes; hidden states and logits as in `Launch`."""
        state, sizes = self._state, self._state.sizes
        mixed, bucket = of.mixed, of.size
        rows = min(bucket, sizes.rows)
        tiles = bucket // attention.tile_tokens(self._shape(), self._ops.tuning) + rows if mixed else 0
        state.unpack()
        inputs = CudaInputs(
            state.token_ids[:bucket], self._extent, state, self._work, rows, min(tiles, sizes.tiles), of.shared
        )
        hidden = self._ops.settled(self._model.forward(inputs, self._cache, self._group))  # type: ignore[arg-type]
        chosen = self._ops.gather(hidden, state.sample_tokens[:rows], state.num_samples)
        logits = self._model.logits(chosen, self._group)
        draw(
            self._draws, logits, state.num_samples, state.sample_slots, state.sample_indices, state.state, state.out,
            state.entry, state.step, rows, dependent=self._ops.dependent,
        )  # fmt: skip
        return hidden, logits

    def buckets(self) -> list[Bucket]:
        """Largest first, so that the pool is laid out once."""
        listed = [Bucket(size, mixed=True) for size in self._mixed] + [Bucket(size) for size in self._decode]
        if not any(self._model.spec.windows):
            listed += [Bucket(size, shared=True) for size in self._decode if size > 1]
        return sorted(listed, key=lambda bucket: -bucket.size)

    def capture(self) -> None:
        """Capture every bucket. Each must have run once, so that its kernels are loaded."""
        pool = None
        for bucket in self.buckets():
            smallest = bucket == Bucket(1)
            graph = torch.cuda.CUDAGraph(keep_graph=smallest)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden, logits = self.run(bucket)
            pool = graph.pool()
            if smallest:
                self.kernels_a_step = _nodes(graph)
                graph.instantiate()
            self._launches[bucket] = Replay(graph, hidden, logits)

    def launch_kernels(self) -> None:
        """Without graphs: every step launches its kernels one by one. The same bits, slowly."""
        for bucket in self.buckets():
            self._launches[bucket] = functools.partial(self.run, bucket)

    def of_step(self, num_rows: int, num_tokens: int, sharing: bool = False) -> Launch:
        """The smallest bucket that holds the step. sharing: rows share splits worth reading once."""
        if num_rows != num_tokens:
            return self._launches[Bucket(next(b for b in self._mixed if b >= num_tokens), mixed=True)]
        bucket = Bucket(next(b for b in self._decode if b >= num_rows), shared=sharing)
        return self._launches.get(bucket) or self._launches[Bucket(bucket.size)]

    def _shape(self) -> attention.Shape:
        keys = self._cache.layers[0].keys
        heads = len(self._model.shard.part(self._model.spec.num_heads))
        return attention.Shape(heads, keys.shape[1], keys.shape[3], self._cache.block_size)
