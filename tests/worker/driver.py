"""A step at a time through a model, without scheduler or sampler: what the worker's tests drive it with.

Rows, chunks and block tables are the test's choice, so that a test can say "the same row, cut otherwise".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker_svc.kv_cache import KVCache
from worker_svc.models import Decoder
from worker_svc.parallel.group import Group, SingleGroup
from worker_svc.slots import StepPlan
from worker_svc.step_inputs import build


@dataclass
class DrivenRow:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    num_cached: int = 0


class Driver:
    """Args:
    shuffle: hand out blocks in a random order, so that neighbours in a sequence are not neighbours in memory.
    """

    def __init__(
        self,
        model: Decoder,
        group: Group | None = None,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        shuffle: bool = True,
    ) -> None:
        self.model = model
        self.group = group or SingleGroup()
        dtype = kv_dtype or model.ops.dtype
        self.cache = KVCache(model.spec, num_blocks, block_size, dtype=dtype, shard=model.shard)
        free = np.random.default_rng(5).permutation(num_blocks) if shuffle else np.arange(num_blocks)
        self.free: list[int] = free.tolist()

    def step(self, rows: Sequence[DrivenRow], num_new: Sequence[int]) -> torch.Tensor:
        """Final hidden states of the step's tokens [T, D]; the rows' counts are advanced."""
        size = self.cache.block_size
        for row, new in zip(rows, num_new, strict=True):
            while len(row.blocks) * size < row.computed + new:
                row.blocks.append(self.free.pop())
        widest = max(len(row.blocks) for row in rows)
        starts = np.concatenate(([0], np.cumsum(num_new))).astype(np.int32)
        first = np.array([row.computed for row in rows], np.int32)
        tokens = [row.tokens[row.computed : row.computed + new] for row, new in zip(rows, num_new, strict=True)]
        plan = StepPlan(
            slots=np.arange(len(rows), dtype=np.int32),
            num_new=np.array(num_new, np.int32),
            first_position=first,
            num_cached=np.array([row.num_cached for row in rows], np.int32),
            samples=np.array([row.computed + n == len(row.tokens) for row, n in zip(rows, num_new, strict=True)]),
            token_ids=np.array([token for part in tokens for token in part], np.int32),
            block_tables=np.array([row.blocks + [0] * (widest - len(row.blocks)) for row in rows], np.int32),
            query_starts=starts,
            rows=(),
        )
        hidden = self.model.forward(build(plan), self.cache, self.group)
        for row, new in zip(rows, num_new, strict=True):
            row.computed += new
        return hidden

    def logits(self, tokens: Sequence[int], chunks: Iterable[int] = ()) -> torch.Tensor:
        """Logits at every position [T, V], the tokens cut into these chunks and the rest."""
        row = DrivenRow(list(tokens))
        hidden = []
        for chunk in [*chunks, len(tokens)]:
            new = min(chunk, len(tokens) - row.computed)
            if new:
                hidden.append(self.step([row], [new]))
        self.free += row.blocks
        return self.model.logits(torch.cat(hidden), self.group)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 10**6) -> list[list[int]]:
        """Continuations of all prompts run together, prefills cut to `chunk` beside the others' decodes."""
        rows = [DrivenRow(list(prompt)) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        while live := [r for r, n in zip(rows, lengths, strict=True) if len(r.tokens) < n + num_tokens]:
            new = [min(chunk, len(row.tokens) - row.computed) for row in live]
            hidden = self.step(live, new)
            done = [i for i, row in enumerate(live) if row.computed == len(row.tokens)]
            if done:
                last = torch.tensor([sum(new[: i + 1]) - 1 for i in done])
                drawn = self.model.logits(hidden[last], self.group).argmax(-1).tolist()
                for i, token in zip(done, drawn, strict=True):
                    live[i].tokens.append(token)
        for row in rows:
            self.free += row.blocks
        return [row.tokens[n:] for row, n in zip(rows, lengths, strict=True)]
