"""A pseudo-model over the real slot table: exact, fast, and wrong as soon as the core is.

The cache cell of position p holds h(p) = A h(p - 1) + token(p) + p, read through the block table; a row's draw mixes
its seed, choice and output index with *every* cell up to its last position, as attention would. So a wrong block, a
write into a shared one, a lost token or a stale cache changes tokens. `solo` says what a request must get, from the
definition alone, without core, table or cache.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from protos.step import NO_FLOATS, NO_INTS, RowSampling, StepBatch, StepResult, step_digest
from scheduler_svc.core.request import Request
from worker_svc.slots import SlotTable, StepPlan

V = 97
A = np.uint64(6364136223846793005)
MASK = (1 << 64) - 1
INVERSE = pow(int(A), -1, 1 << 64)


def _powers(base: int, count: int) -> np.ndarray:
    """base ** 0 .. base ** count, modulo 2 ** 64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mix(value: int, *more: int) -> int:
    """64 well-mixed bits of the integers (splitmix64)."""
    for part in more:
        value = (value ^ (part + 0x9E3779B97F4A7C15 + (value << 6) + (value >> 2))) & MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        value ^= value >> 31
    return value


def draw(context: int, sampling: RowSampling, seed: int, choice: int, index: int, vocab: int) -> int:
    token = mix(context, seed, choice, index) % vocab
    if index < sampling.min_tokens:
        while token in sampling.stop_ids:
            token = (token + 1) % vocab
    return token


def logprob(context: int, token: int) -> float:
    return -float(np.float32(mix(context, token, 7) % 1000 / 100))


def solo(request: Request, choice: int = 0, vocab: int = V) -> tuple[list[int], str]:
    """Output tokens of the choice and its finish reason, from the definition."""
    known = request.prompt.tolist() + (request.resume[choice].tolist() if request.resume else [])
    output = known[len(request.prompt) :]
    stops = request.eos_ids | request.stop_token_ids
    if output and output[-1] in stops and len(output) > request.sampling.min_tokens:
        return output, "stop"
    h = context = 0
    done = 0
    while len(output) < request.max_tokens:
        for position in range(done, len(known)):
            h = (h * int(A) + known[position] + position) & MASK
            context = (context + h) & MASK
        done = len(known)
        token = draw(context, request.sampling, request.seed, choice, len(output), vocab)
        known.append(token)
        output.append(token)
        if len(output) > request.sampling.min_tokens and token in stops:
            return output, "stop"
    return output, "length"


class FakeExecutor:
    """Runs batches at once and hands results out in order. Times out nothing, loses nothing.

    Args:
        strict: read every cell of a row's context; False reads only the last one (fast, for simulations).
        poisoned: whether this row's logits hold a NaN at this output index.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        *,
        vocab: int = V,
        sample_at_scheduler: bool = False,
        strict: bool = True,
        poisoned: Callable[[str, int], bool] = lambda name, index: False,
    ) -> None:
        self.block_size, self.vocab, self.strict = block_size, vocab, strict
        self.sample_at_scheduler, self.poisoned = sample_at_scheduler, poisoned
        self._sizes = (max_num_seqs, num_blocks)
        self.num_tokens = 0
        self.num_steps = 0
        self.batches: list[StepBatch] = []
        self.keep_batches = False
        self._writes: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}  # of steps not handed out yet
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.restart()

    def restart(self) -> None:
        """A fresh group: every slot and every cell is gone."""
        max_num_seqs, num_blocks = self._sizes
        self.table = SlotTable(max_num_seqs, num_blocks, block_size=self.block_size, num_blocks=num_blocks)
        self.cache = np.full((num_blocks, self.block_size), 0xDEADBEEF, np.uint64)
        self._pending = np.zeros((num_blocks, self.block_size), np.int32)  # writes of steps that are not handed out
        self._writes.clear()

    def run(self, batch: StepBatch) -> StepResult:
        if self.keep_batches:
            self.batches.append(batch)
        plan = self.table.apply(batch)
        self.num_steps += 1
        self.num_tokens += len(plan.token_ids)
        if self.strict:
            self._check_found(batch)
        self._writes[batch.seq] = []
        contexts, scores = self._forward(batch.seq, plan)
        if self.strict:
            self._check_written(self._writes[batch.seq])
        return self._sample(batch, plan, contexts, scores)

    def finish(self, seq: int) -> None:
        """The step's result is handed out: until now its writes may still land, so they land once more."""
        for blocks, offsets, values in self._writes.pop(seq):
            self.cache[blocks, offsets] = values
            self._pending[blocks, offsets] -= 1

    def _check_found(self, batch: StepBatch) -> None:
        """What a new row finds in the cache is acknowledged."""
        for row in batch.rows:
            positions = np.arange(row.num_cached)
            blocks = row.block_ids[positions // self.block_size]
            assert not self._pending[blocks, positions % self.block_size].any(), f"{row.name} found unfinished blocks"

    def _check_written(self, writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Nobody writes to a block that stands in two tables."""
        tables = [self.table._tables[slot, : self.table._table_lengths[slot]] for slot in self.table.live]
        owners = np.bincount(np.concatenate(tables), minlength=len(self.cache)) if tables else np.zeros(1)
        for blocks, _offsets, _values in writes:
            assert (owners[blocks] == 1).all(), f"a write into shared blocks among {blocks}"

    def sample(self, result: StepResult) -> StepResult:
        """What host sampling makes of a result that holds logits only."""
        token_ids, logprobs, asking = self._drawn.pop(result.seq)
        logits = result.logits[asking] if result.logits is not None and asking.any() else None
        return replace(result, token_ids=token_ids, logprobs=logprobs, logits=logits)

    def _write(self, seq: int, blocks: np.ndarray, offsets: np.ndarray, values: np.ndarray, cached: np.ndarray) -> None:
        """Cells of positions that the row found in the cache are computed and not written."""
        blocks, offsets, values = blocks[~cached], offsets[~cached], values[~cached]
        self.cache[blocks, offsets] = values
        self._pending[blocks, offsets] += 1
        self._writes[seq].append((blocks, offsets, values))

    def _forward(self, seq: int, plan: StepPlan) -> tuple[list[int], list[float]]:
        """The context of each sampling row; scores of prompt tokens."""
        contexts: list[int] = []
        scores: list[float] = []
        size = self.block_size
        single = plan.num_new == 1
        with np.errstate(over="ignore"):
            if single.any():
                rows = np.flatnonzero(single)
                p = plan.first_position[rows]
                tables, before = plan.block_tables[rows], np.maximum(p - 1, 0)
                lanes = np.arange(len(rows))
                previous = np.where(p > 0, self.cache[tables[lanes, before // size], before % size], 0).astype(
                    np.uint64
                )
                value = previous * A + plan.token_ids[plan.query_starts[rows]].astype(np.uint64) + p.astype(np.uint64)
                self._write(seq, tables[lanes, p // size], p % size, value, p < plan.num_cached[rows])
            for row in np.flatnonzero(~single).tolist():
                self._prefill(seq, plan, row)
        for row in range(len(plan.slots)):
            end = int(plan.first_position[row] + plan.num_new[row])
            intro = plan.rows[row]
            wants_scores = intro.prompt_logprobs is not None
            if not plan.samples[row] and not wants_scores:
                continue
            context_cells = self._cells(plan, row, end)
            if plan.samples[row]:
                contexts.append(int(context_cells.sum(dtype=np.uint64)) if self.strict else int(context_cells[-1]))
            if wants_scores:
                for position in range(int(plan.first_position[row]), min(end, intro.num_prompt - 1)):
                    target = int(intro.token_ids[position + 1])
                    scores.append(logprob(int(context_cells[: position + 1].sum(dtype=np.uint64)), target))
        return contexts, scores

    def _cells(self, plan: StepPlan, row: int, end: int) -> np.ndarray:
        if not self.strict:
            return self.cache[plan.block_tables[row, (end - 1) // self.block_size], (end - 1) % self.block_size][None]
        positions = np.arange(end)
        return self.cache[plan.block_tables[row, positions // self.block_size], positions % self.block_size]

    def _prefill(self, seq: int, plan: StepPlan, row: int) -> None:
        first, count = int(plan.first_position[row]), int(plan.num_new[row])
        tokens = plan.token_ids[plan.query_starts[row] : plan.query_starts[row + 1]].astype(np.uint64)
        positions = np.arange(first, first + count)
        table, size = plan.block_tables[row], self.block_size
        h = self.cache[table[(first - 1) // size], (first - 1) % size] if first else np.uint64(0)
        up, down = _powers(int(A), count), _powers(INVERSE, count)
        terms = (tokens + positions.astype(np.uint64)) * down[1 : count + 1]
        values = up[1 : count + 1] * (h + np.cumsum(terms, dtype=np.uint64))
        self._write(seq, table[positions // size], positions % size, values, positions < plan.num_cached[row])

    def _sample(self, batch: StepBatch, plan: StepPlan, contexts: list[int], scores: list[float]) -> StepResult:
        sampling = [(row, int(slot)) for row, slot, s in zip(plan.rows, plan.slots, plan.samples) if s]
        ids = np.zeros(len(sampling), np.int32)
        logprobs = np.zeros(len(sampling), np.float32)
        alternatives: list[int] = []
        failed: list[int] = []
        logits: list[np.ndarray] = []
        ends = (plan.first_position + plan.num_new)[plan.samples]
        for i, ((row, slot), context) in enumerate(zip(sampling, contexts)):
            index = int(ends[i]) - row.num_prompt
            if self.poisoned(row.name, index):
                ids[i] = -1
                failed.append(slot)
            else:
                ids[i] = draw(context, row.sampling, row.seed, row.choice, index, self.vocab)
            if row.sampling.logprobs is not None:
                logprobs[i] = logprob(context, int(ids[i]))
                alternatives += [(int(ids[i]) + k) % self.vocab for k in range(row.sampling.logprobs)]
            if row.sampling.return_logits or self.sample_at_scheduler:
                logits.append(np.full(self.vocab, np.float32(context % 1000)))
        failed_slots = np.array(failed, np.int32)
        drawn = NO_INTS if self.sample_at_scheduler else ids
        if self.sample_at_scheduler:
            asking = np.array([row.sampling.return_logits for row, _slot in sampling], bool)
            self._drawn[batch.seq] = ids, logprobs, asking
        else:
            self.table.drawn(plan, ids)
        return StepResult(
            batch.epoch,
            batch.seq,
            step_digest(batch.epoch, batch.seq, drawn, logprobs, failed_slots),
            token_ids=drawn,
            logprobs=NO_FLOATS if self.sample_at_scheduler else logprobs,
            alternative_ids=np.array(alternatives, np.int32),
            alternative_logprobs=np.array(alternatives, np.float32),
            prompt_logprobs=np.array(scores, np.float32),
            failed_slots=failed_slots,
            logits=np.stack(logits) if logits else None,
            prompt_alternative_ids=self._prompt_alternatives(plan),
            prompt_alternative_logprobs=self._prompt_alternatives(plan).astype(np.float32),
        )

    def _prompt_alternatives(self, plan: StepPlan) -> np.ndarray:
        """Position p of a row that asks for k alternatives gets k times p."""
        out: list[int] = []
        for row, first, count in zip(plan.rows, plan.first_position.tolist(), plan.num_new.tolist()):
            if row.prompt_logprobs is not None:
                for position in range(first, min(first + count, row.num_prompt - 1)):
                    out += [position] * row.prompt_logprobs
        return np.array(out, np.int32)
