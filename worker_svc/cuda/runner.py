"""The runner on CUDA: a step is one graph launch; `result` waits for its event and reads pinned memory.

Knows the order of a step's parts and the two ways a row is drawn: rows that only ask for a temperature (and perhaps
for the drawn token's logprob) by the graph's own kernels, so that the next step may follow before this one is seen;
rows that ask for more by `worker_svc.sampling` from the graph's logits, which waits for the device. Which way is a
fact of the row, never of the batch. Does not know kernels. Invariant: at most RING - 2 steps are unresolved, so no
entry of the rings is written while it is read.

Legend: S sampling rows, P prompt positions to score, V vocabulary.
"""

import gc
import logging
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from protos.step import NO_FLOATS, NO_INTS, Description, Floats, GroupConfig, Int32s, StepBatch, StepResult
from worker_svc.assembly import describe
from worker_svc.config import WorkerConfig
from worker_svc.cpu_runner import Done
from worker_svc.cuda import attention
from worker_svc.cuda.graphs import StepGraphs
from worker_svc.cuda.ops import CudaOps
from worker_svc.cuda.sampler import Draws
from worker_svc.cuda.sharing import Sharing
from worker_svc.cuda.step_state import RING, Pairs, Sizes, StepState
from worker_svc.fingerprint import Fingerprint, model_hash, numerics_part
from worker_svc.kv_cache import KVCache, blocks_in
from worker_svc.models.decoder import Decoder
from worker_svc.models.load import CheckedSnapshot, resolve_dtype
from worker_svc.parallel.group import Group
from worker_svc.prompt_scores import PromptScores
from worker_svc.sampling import Drawn, SamplerRow, sample
from worker_svc.slots import SlotTable, StepPlan
from worker_svc.spec import Shard

logger = logging.getLogger(__name__)

RESERVE_BYTES = 3 << 29  # beside weights, cache and what steps take: other libraries, fragmentation
WARM_BLOCKS = 2  # of the cache that kernels are loaded with


@dataclass(slots=True)
class Pending:
    """A step on the device. `drawn`: what the host drew for rows that ask for more, by place among the S rows."""

    batch: StepBatch
    event: torch.cuda.Event
    entry: int
    out: Int32s  # the ring entry, tokens and then logprob bits
    num_samples: int
    slots: Int32s  # [S]
    scores: PromptScores
    places: Int32s
    drawn: Drawn | None
    logits: Floats | None
    discard: bool  # sampling is the scheduler's: nothing drawn here counts
    group: Group

    def result(self) -> StepResult:
        self.event.synchronize()
        self.group.check()
        width = len(self.out) // 2
        tokens = self.out[: self.num_samples].copy()
        logprobs = self.out[width : width + self.num_samples].view(np.float32).copy()
        alternative_ids, alternative_logprobs = NO_INTS, NO_FLOATS
        if self.drawn is not None:
            tokens[self.places], logprobs[self.places] = self.drawn.token_ids, self.drawn.logprobs
            alternative_ids, alternative_logprobs = self.drawn.alternative_ids, self.drawn.alternative_logprobs
        failed = set(self.slots[tokens < 0].tolist()) | set(self.scores.failed_slots)
        if self.discard:
            tokens, logprobs, failed = NO_INTS, NO_FLOATS, set(self.scores.failed_slots)
        prompt_logprobs, prompt_ids, prompt_values = self.scores.columns()
        return StepResult(
            self.batch.epoch,
            self.batch.seq,
            digest=0,
            token_ids=tokens,
            logprobs=logprobs,
            alternative_ids=alternative_ids,
            alternative_logprobs=alternative_logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_alternative_ids=prompt_ids,
            prompt_alternative_logprobs=prompt_values,
            failed_slots=np.array(sorted(failed), np.int32),
            logits=self.logits,
        )


class CudaRunner:
    """Args:
    model: this rank's shard, loaded with `CudaOps`.
    description: its facts; `memory_bytes` is free memory once the weights are loaded.
    kv_memory_bytes: for the cache; None: what a warmed-up step leaves.
    graphs: False launches kernels one by one, for debugging and tests.
    """

    def __init__(
        self, model: Decoder, description: Description, device: torch.device, kv_memory_bytes: int | None,
        *, graphs: bool = True,
    ) -> None:  # fmt: skip
        assert isinstance(model.ops, CudaOps)
        self._model, self._ops = model, model.ops
        self._description = description
        self._device = device
        self._kv_memory_bytes = kv_memory_bytes
        self._use_graphs = graphs
        self._graphs: StepGraphs | None = None
        self._cache: KVCache | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def describe(self) -> Description:
        return self._description

    def join(self, config: GroupConfig, group: Group) -> int:
        started = time.monotonic()
        torch.cuda.set_device(self._device)
        self._graphs = self._cache = None  # two at once may not fit
        self._free()
        self._config, self._group = config, group
        spec, shard = self._model.spec, Shard(group.rank, group.tp)
        blocks = -(-config.max_seq_len // config.block_size)
        to_split_end = -(-config.max_seq_len // attention.SPLIT) * attention.SPLIT // config.block_size
        heads, kv_heads = len(shard.part(spec.num_heads)), len(shard.kv_heads(spec.num_kv_heads))
        shape = attention.Shape(heads, kv_heads, spec.head_dim, config.block_size)
        self._tile_tokens = attention.tile_tokens(shape, self._ops.tuning)
        tiles = config.max_batch_tokens // self._tile_tokens + config.max_num_seqs
        sizes = Sizes(config.max_num_seqs, config.max_batch_tokens, tiles, max(blocks, to_split_end))
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._model.reserve_positions(config.max_seq_len)
            self._state = StepState(sizes, self._device)
            self._sharing = Sharing(sizes.rows, sizes.max_items, config.block_size)
            self._pairs = Pairs(sizes, self._sharing)
            work = attention.Work(shape, sizes.rows, config.max_seq_len, self._device)
            draws = Draws(sizes.rows, spec.vocab_size, self._device)
            warm = KVCache(
                spec, WARM_BLOCKS, config.block_size, dtype=self._ops.dtype, shard=shard, device=self._device
            )
            graphs = StepGraphs(self._model, warm, group, self._state, work, draws, config.max_seq_len - 1)
            for bucket in graphs.buckets():
                graphs.run(bucket)  # of an empty message: loads every kernel
            torch.cuda.synchronize()
            warmed = time.monotonic()
            before, _ = torch.cuda.mem_get_info()
            self._make(graphs)  # thrown away: it shows what graphs and their steps take
            free, _ = torch.cuda.mem_get_info()
            step_bytes = before - free
            del graphs, warm
            self._free()
            num_blocks = self._num_blocks(free, shard)
            self._cache = KVCache(
                spec, num_blocks, config.block_size, dtype=self._ops.dtype, shard=shard, device=self._device
            )
            graphs = StepGraphs(self._model, self._cache, group, self._state, work, draws, config.max_seq_len - 1)
            self._make(graphs)
            self._state.written = int(self._state.step)  # warm-up steps advanced the device's counter
        self._graphs = graphs
        self._slots = SlotTable(config.max_num_seqs, blocks, block_size=config.block_size, num_blocks=num_blocks)
        self._special: dict[int, SamplerRow] = {}  # rows that the host draws, by slot
        self._unresolved: deque[Pending] = deque()
        logger.info(
            "epoch %d: kernels in %.1f s, graphs in %.1f s, graphs and steps take %.2f GiB, %d blocks of %d tokens, "
            "%d kernels in a step of one row",
            config.epoch, warmed - started, time.monotonic() - warmed, step_bytes / 2**30, num_blocks,
            config.block_size, graphs.kernels_a_step,
        )  # fmt: skip
        return num_blocks

    def _num_blocks(self, free_bytes: int, shard: Shard) -> int:
        """As many as asked for, if they fit: whoever asks has seen memory without graphs. A few fewer always fit
        again."""
        asked = self._config.num_blocks

        def fit(memory_bytes: int) -> int:
            item = self._ops.dtype.itemsize
            return blocks_in(max(0, memory_bytes), self._model.spec, shard, item, self._config.block_size)

        if asked and asked <= fit(free_bytes - RESERVE_BYTES // 3):
            return asked
        return fit(self._kv_memory_bytes or free_bytes - RESERVE_BYTES)

    def _make(self, graphs: StepGraphs) -> None:
        if self._use_graphs:
            graphs.capture()
        else:
            graphs.launch_kernels()
        torch.cuda.synchronize()

    def _free(self) -> None:
        """Give what nobody refers to any more back to the device."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def launch(self, batch: StepBatch) -> Pending | Done:
        assert self._graphs is not None
        plan = self._slots.apply(batch)
        for slot in batch.retired.tolist():
            self._special.pop(slot, None)
            self._sharing.retire(slot)
        for row in batch.rows:
            self._pairs.introduce(row)
            self._sharing.introduce(row)
            sampler = SamplerRow(row)
            if not _drawn_on_device(sampler):
                self._special[row.slot] = sampler
        if len(batch.extended_slots):
            slots, counts = batch.extended_slots.tolist(), batch.extended_counts.tolist()
            self._pairs.extend(slots, counts, batch.extended_blocks)
        if not len(plan.slots):
            return Done(StepResult(batch.epoch, batch.seq, 0))
        while len(self._unresolved) >= RING - 2:
            self._unresolved.popleft().event.synchronize()
        self._pairs.share()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            tokens = int(plan.query_starts[-1])
            launch = self._graphs.of_step(len(plan.slots), tokens, self._sharing.worth_it)
            entry = self._state.write(plan, self._pairs, self._tile_tokens)
            hidden_TD, logits_SV = launch()
            pending = self._finish(batch, plan, hidden_TD, logits_SV, entry)
            pending.event.record()
        self._unresolved.append(pending)
        return pending

    def _finish(self, batch: StepBatch, plan: StepPlan, hidden_TD: Tensor, logits_SV: Tensor, entry: int) -> Pending:
        """What of a step the host does after the graph: nothing for rows that only ask for a temperature."""
        slots = plan.slots[plan.samples]
        scores = PromptScores()
        if any(row.prompt_logprobs is not None for row in plan.rows):
            with self._ops.outside_a_step():
                scores.add(self._model, hidden_TD, plan, self._group)
        at_scheduler = self._config.sample_at_scheduler
        places = NO_INTS
        drawn, logits = None, None
        if at_scheduler:
            logits = logits_SV[: len(slots)].cpu().numpy() if len(slots) and self._group.rank == 0 else None
        else:
            if self._special:
                places = np.array([i for i, slot in enumerate(slots.tolist()) if slot in self._special], np.int32)
            tokens = np.full(len(slots), -1, np.int32)
            if len(places):
                drawn, logits = self._draw(logits_SV, places, slots[places])
                tokens[places] = np.maximum(drawn.token_ids, 0)
            self._slots.drawn(plan, tokens)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return Pending(
            batch, event, entry, self._state.out_host[entry], len(slots), slots, scores, places, drawn, logits,
            at_scheduler, self._group,
        )  # fmt: skip

    def _draw(self, logits_SV: Tensor, places: Int32s, slots: Int32s) -> tuple[Drawn, Floats | None]:
        """Draw on the host, and make what was drawn known to the next step."""
        rows = [self._special[slot] for slot in slots.tolist()]
        logits = logits_SV[torch.from_numpy(places).to(self._device)].cpu()
        drawn = sample(logits, rows)
        known = np.maximum(drawn.token_ids, 0)
        for row, token in zip(rows, known.tolist()):
            row.append(token)
        last = torch.from_numpy(known).to(self._device)
        self._state.state[torch.from_numpy(slots).to(self._device), 0] = last
        wanted = np.array([row.sampling.return_logits for row in rows], bool)
        return drawn, logits.numpy()[wanted] if wanted.any() and self._group.rank == 0 else None


def _drawn_on_device(row: SamplerRow) -> bool:
    sampling = row.sampling
    return (
        row.plain
        and sampling.top_k == 0
        and sampling.top_p >= 1
        and sampling.min_p <= 0
        and not sampling.logprobs
        and not sampling.return_logits
    )


def load_cuda_runner(config: WorkerConfig, checked: CheckedSnapshot, model: Decoder) -> CudaRunner:
    """A runner over a model that is loaded on `config.device`."""
    device = torch.device(config.device)
    device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    torch.cuda.set_device(device)
    dtype = resolve_dtype(config.dtype or "auto", checked.spec)
    name = str(dtype).removeprefix("torch.")
    properties = torch.cuda.get_device_properties(device)
    fingerprint = Fingerprint(
        numerics=numerics_part(config.numerics),
        model=model_hash(checked.snapshot),
        device=properties.name,
        isa=f"sm_{properties.major}{properties.minor}",
        arithmetic="triton" if config.numerics == "invariant" else "cublas",
        dtype=name,
        kv_dtype=name,
        leaves=str(checked.spec.leaves) if config.tp_invariant else "1",
        torch=torch.__version__,
        triton=triton.__version__,
        threads="any",
        tp="any" if config.tp_invariant else str(config.tp),
    )
    free, _ = torch.cuda.mem_get_info(device)
    memory = config.kv_memory_bytes or max(0, free - RESERVE_BYTES)
    return CudaRunner(
        model, describe(config, checked, dtype, memory, fingerprint), device, config.kv_memory_bytes,
        graphs=config.cuda_graphs,
    )  # fmt: skip
