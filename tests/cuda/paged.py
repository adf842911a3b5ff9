"""A paged cache with random contents, rows over it, and attention in double precision: the oracle of the kernels."""

from dataclasses import dataclass

import torch

from worker_svc.cuda.attention import (
    RECORD,
    SHARED_COLUMN,
    SPLIT,
    SPLITS,
    Shape,
    Tuning,
    Work,
    decode,
    decode_shared,
    plan,
    prefill,
    tile_tokens,
)
from worker_svc.cuda.decode_hopper import Unrotated
from worker_svc.cuda.step_state import PARAMETERS


@dataclass
class Rows:
    state: torch.Tensor
    tables: torch.Tensor
    row_slots: torch.Tensor
    query_starts: torch.Tensor
    first_positions: torch.Tensor
    decode_lengths: torch.Tensor
    num_rows: torch.Tensor
    tile_rows: torch.Tensor
    tile_tokens: torch.Tensor
    num_tiles: torch.Tensor
    groups: torch.Tensor
    shared_items: torch.Tensor
    num_shared_items: torch.Tensor


class Paged:
    """Sequences of the given lengths, each in its own slot, their blocks scattered over a pool."""

    def __init__(self, shape: Shape, lengths: list[int], device: str, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.shape, self.lengths, self.device = shape, lengths, device
        per_row = [-(-n // shape.block_size) for n in lengths]
        pool = [sum(per_row) + 1, shape.kv_heads, shape.block_size, shape.head_dim]
        self.k = torch.randn(pool, generator=generator, device=device).to(dtype)
        self.v = torch.randn(pool, generator=generator, device=device).to(dtype)
        self.q = torch.randn(sum(lengths), shape.heads, shape.head_dim, generator=generator, device=device).to(dtype)
        width = -(-max(lengths) // SPLIT) * SPLIT // shape.block_size
        table = torch.zeros(len(lengths), width, dtype=torch.int32)
        order = torch.randperm(sum(per_row), generator=generator, device=device).int().cpu() + 1
        for r, blocks in enumerate(order.split(per_row)):
            table[r, : len(blocks)] = blocks
        self.state = torch.zeros(len(lengths), PARAMETERS + width, dtype=torch.int32)
        self.state[:, PARAMETERS:] = table
        self.state = self.state.to(device)
        self.tables = self.state[:, PARAMETERS:]
        self.groups = torch.full((len(lengths), RECORD), -1, dtype=torch.int32, device=device)
        self.items: list[int] = []

    def share(self, members: list[int], splits: int) -> None:
        """Give sequences the leading blocks of the first of them, and have them read together."""
        blocks = splits * SPLIT // self.shape.block_size
        self.tables[members, :blocks] = self.tables[members[0], :blocks].clone()
        self.state[members, SHARED_COLUMN] = splits
        number = len(self.items)
        self.groups[number, 0] = splits
        self.groups[number, 1 : 1 + len(members)] = torch.tensor(members, dtype=torch.int32, device=self.device)
        self.items += [number * SPLITS + split for split in range(splits)]

    def run(self, spans: list[tuple[int, int, int]], tuning: Tuning, *, shared: bool = False) -> torch.Tensor:
        """Attention of positions first .. first + new of each (sequence, first, new): [sum of new, H, D]."""

        height = tile_tokens(self.shape, tuning)
        tiles = [(r, t) for r, (_, _, new) in enumerate(spans) if new > 1 for t in range(0, new, height)][
            ::-1
        ]  # as in a step: late first
        rows = self._rows(spans, tiles)
        offsets = [sum(self.lengths[:s]) for s in range(len(self.lengths))]
        q = torch.cat([self.q[offsets[s] + first : offsets[s] + first + new] for s, first, new in spans])
        out = torch.full_like(q, float("nan"))
        work = Work(self.shape, len(self.lengths), max(self.lengths), self.device)
        plan(self.shape, rows, work, len(spans), shared=shared)
        if shared:
            decode_shared(self.shape, q, self.k, self.v, rows, work, tuning)
        decode(self.shape, q, self.k, self.v, rows, work, out, len(spans), tuning)
        prefill(self.shape, q, self.k, self.v, rows, out, len(tiles) + 1, tuning)
        return out

    def decode_all(
        self, q: torch.Tensor | Unrotated, k: torch.Tensor, v: torch.Tensor, tuning: Tuning, *,
        dependent: bool = False, early: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of every sequence's last position, over other caches."""
        shape = self.shape
        rows = self._rows([(s, n - 1, 1) for s, n in enumerate(self.lengths)], [])
        out = torch.full((len(q), shape.heads, shape.head_dim), float("nan"), device=self.device, dtype=k.dtype)
        work = Work(shape, len(self.lengths), max(self.lengths), self.device)
        plan(shape, rows, work, len(q))
        if self.device == "cuda":
            torch.cuda.synchronize()
        decode(shape, q, k, v, rows, work, out, len(q), tuning, dependent=dependent, early=early)
        return out

    def _rows(self, spans: list[tuple[int, int, int]], tiles: list[tuple[int, int]]) -> Rows:
        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        starts = [0]
        for _, _, new in spans:
            starts.append(starts[-1] + new)
        return Rows(
            self.state, self.tables, column([s for s, _, _ in spans]), column(starts),
            column([first for _, first, _ in spans]),
            column([first + 1 if new == 1 else 0 for _, first, new in spans]), column([len(spans)]),
            column([r for r, _ in tiles] or [0]), column([t for _, t in tiles] or [0]), column([len(tiles)]),
            self.groups, column(self.items or [0]), column([len(self.items)]),
        )  # fmt: skip

    def reference(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        shape, outs = self.shape, []
        for s, first, new in spans:
            length = first + new
            blocks = self.tables[s, : -(-length // shape.block_size)].long()
            k, v = (
                cache[blocks].transpose(0, 1).reshape(shape.kv_heads, -1, shape.head_dim)[:, :length].double()
                for cache in (self.k, self.v)
            )
            group = shape.heads // shape.kv_heads
            offset = sum(self.lengths[:s])
            q = self.q[offset + first : offset + length].double().transpose(0, 1)
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * shape.head_dim**-0.5
            query, key = torch.arange(first, length)[:, None], torch.arange(length)[None, :]
            hidden = key > query
            if shape.window:
                hidden = hidden | (key <= query - shape.window)
            weights = scores.masked_fill(hidden.to(self.device), float("-inf")).softmax(-1)
            outs.append((weights @ v.repeat_interleave(group, 0)).transpose(0, 1))
        return torch.cat(outs)
