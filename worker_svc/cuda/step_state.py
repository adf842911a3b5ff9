"""What the device knows of slots and of the step at hand, and the message that tells it.

Host and device meet in two rings of pinned memory: the launch thread writes a step's *message* into the next entry of
one, the step's first kernel reads it from there (and sends no copy command), and the draw writes tokens into the
other. A
counter on the device says which entry is next, so that a captured step finds its message; it advances once a step.

The slot state is one int32 table [slots, PARAMETERS + blocks]; columns:

    0 last token    1 temperature bits, 0 greedy    2 report temperature bits, 0: no logprob    3, 4 seed low, high
    5 choice        6 prompt length                 7 splits that a group reads (sharing.py)    8.. block table

Behind the slots, in the same storage, lie the records of groups, the list of their items and its length. A message
changes all of it by (flat index, value) pairs, applied before anything of the step is read. Everything else of a step
that the device needs is derived from the message by `unpack_kernel`: token ids (-1: the slot's last token),
positions, the slot of each token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra.cuda import gdc_launch_dependents

from protos.step import Int32s, Row
from worker_svc.cuda.attention import RECORD, SHARED_COLUMN
from worker_svc.cuda.sharing import Sharing
from worker_svc.sampling import SamplerRow
from worker_svc.slots import StepPlan

PARAMETERS = 8
RING = 8
HEADER = 8  # tokens, rows, sampling rows, tiles, pairs, and on the device at ENTRY the entry of the rings
ENTRY = 7
PROGRAMS = 64
# Columns of a message with an entry a row, equally wide, so that one loop copies them.
ROW_COLUMNS = (
    "row_slots",
    "first_positions",
    "query_starts",
    "decode_lengths",
    "sample_tokens",
    "sample_slots",
    "sample_indices",
)


def slot_parameters(row: Row) -> Int32s:
    """[PARAMETERS] of an introduced row."""
    sampler = SamplerRow(row)
    report = sampler.report_temperature if row.sampling.logprobs is not None else 0.0
    temperatures = np.array([0.0 if sampler.greedy else sampler.temperature, report], np.float32).view(np.int32)
    seed = np.array([row.seed], np.uint64).view(np.int32)  # little-endian: low word first
    return np.array([0, *temperatures, *seed, row.choice, row.num_prompt, 0], np.int32)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of a step and of a slot's block table."""

    rows: int
    tokens: int
    tiles: int
    blocks: int

    @property
    def max_items(self) -> int:
        """Splits that groups may share."""
        return max(64, self.rows * 16)

    @property
    def group_area(self) -> tuple[int, int, int, int]:
        """(flat offset of group records, of items, of their number, size of the whole storage)."""
        groups = self.rows * (PARAMETERS + self.blocks)
        items = groups + self.rows // 2 * RECORD
        return groups, items, items + self.max_items, items + self.max_items + 1

    @property
    def columns(self) -> dict[str, tuple[int, int]]:
        """(offset, length) of each column of a message, the header first."""
        lengths = {
            "header": HEADER,
            **dict.fromkeys(ROW_COLUMNS, self.rows + 1),
            "tile_rows": self.tiles,
            "tile_tokens": self.tiles,
            "token_ids": self.tokens,
            "token_slots": self.tokens,
            "positions": self.tokens,
            "pairs": 2 * self.group_area[3] + 2 * self.rows,
        }
        columns, offset = {}, 0
        for name, length in lengths.items():
            columns[name] = (offset, length)
            offset += -(-length // 32) * 32
        return columns


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    """By the programs that share a column: every eighth."""
    for first in range(tl.program_id(0) // 8 * BLOCK, count, tl.num_programs(0) // 8 * BLOCK):
        i = first + tl.arange(0, BLOCK)
        values = tl.load(source + i, mask=i < count, cache_modifier=".cv")
        tl.store(target + i, values, mask=i < count)


@triton.jit
def unpack_kernel(messages, step_ptr, stride, ring, out, state, state_stride,
                  ROW_COLUMNS: tl.constexpr, ROW_WIDTH: tl.constexpr, FIRST_ROW: tl.constexpr,
                  TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, TOKEN_IDS: tl.constexpr,
                  TOKEN_SLOTS: tl.constexpr, POSITIONS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
                  HEADER: tl.constexpr, ENTRY: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Copy the message of this step to `out`, resolving token ids, and apply its pairs to the slot state.

    The pairs touch no slot whose last token is read here: a row introduced in a step knows all of its tokens.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    entry = tl.load(step_ptr) % ring
    message = messages + entry.to(tl.int64) * stride
    tokens = tl.load(message, cache_modifier=".cv")
    rows = tl.load(message + 1, cache_modifier=".cv")
    tiles = tl.load(message + 3, cache_modifier=".cv")
    pairs = tl.load(message + 4, cache_modifier=".cv")
    # A read over the bus takes microseconds, so columns are read side by side: program p has column p % 8.
    part = tl.program_id(0) % 8
    if tl.program_id(0) == ROW_COLUMNS:
        h = tl.arange(0, HEADER)
        values = tl.load(message + h, cache_modifier=".cv")
        tl.store(out + h, tl.where(h == ENTRY, entry, values))
    if part < ROW_COLUMNS:
        column = FIRST_ROW + part * ROW_WIDTH
        _copy(message + column, out + column, rows + 1, BLOCK)
    else:
        _copy(message + TILE_ROWS, out + TILE_ROWS, tiles, BLOCK)
        _copy(message + TILE_TOKENS, out + TILE_TOKENS, tiles, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, tokens, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        slots = tl.load(message + TOKEN_SLOTS + i, mask=i < tokens, other=0, cache_modifier=".cv")
        ids = tl.load(message + TOKEN_IDS + i, mask=i < tokens, other=0, cache_modifier=".cv")
        positions = tl.load(message + POSITIONS + i, mask=i < tokens, other=0, cache_modifier=".cv")
        last = tl.load(state + slots.to(tl.int64) * state_stride, mask=(i < tokens) & (ids < 0), other=0)
        tl.store(out + TOKEN_IDS + i, tl.where(ids < 0, last, ids), mask=i < tokens)
        tl.store(out + TOKEN_SLOTS + i, slots, mask=i < tokens)
        tl.store(out + POSITIONS + i, positions, mask=i < tokens)
    for first in range(tl.program_id(0) * BLOCK, pairs, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        at = tl.load(message + PAIRS + 2 * i, mask=i < pairs, other=0, cache_modifier=".cv")
        value = tl.load(message + PAIRS + 2 * i + 1, mask=i < pairs, other=0, cache_modifier=".cv")
        tl.store(state + at.to(tl.int64), value, mask=i < pairs)


class StepState:
    """The rings, the slot state and the device columns of the step at hand.

    Columns are views with stable addresses: `row_slots`, `first_positions`, `query_starts`, `decode_lengths`,
    `sample_tokens`, `sample_slots`, `sample_indices` [rows], `tile_rows`, `tile_tokens` [tiles], `token_ids`,
    `token_slots`, `positions` [tokens]; counts `num_tokens`, `num_rows`, `num_samples`, `num_tiles` [1], and `entry`
    [1] of the rings.
    """

    def __init__(self, sizes: Sizes, device: torch.device | str) -> None:
        self.sizes = sizes
        self._columns = sizes.columns
        length = sum(self._columns["pairs"])
        pinned = torch.device(device).type == "cuda"
        self._messages = torch.zeros(RING, length, dtype=torch.int32, pin_memory=pinned)
        self._host: NDArray[np.int32] = self._messages.numpy()
        self.out = torch.zeros(RING, 2 * sizes.rows, dtype=torch.int32, pin_memory=pinned)
        self.out_host: NDArray[np.int32] = self.out.numpy()
        groups, items, number, size = sizes.group_area
        storage = torch.zeros(size, dtype=torch.int32, device=device)
        self.state = storage[:groups].view(sizes.rows, PARAMETERS + sizes.blocks)
        self.groups = storage[groups:items].view(-1, RECORD)
        self.shared_items, self.num_shared_items = storage[items:number], storage[number:]
        self.tables = self.state[:, PARAMETERS:]
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self._message = torch.zeros(length, dtype=torch.int32, device=device)
        self.written = 0  # messages so far; the next goes to entry written % RING
        for name, (offset, size) in self._columns.items():
            setattr(self, name, self._message[offset : offset + size])
        self.num_tokens, self.num_rows, self.num_samples, self.num_tiles = (self._message[i : i + 1] for i in range(4))
        self.entry = self._message[ENTRY : ENTRY + 1]

    row_slots: torch.Tensor
    first_positions: torch.Tensor
    query_starts: torch.Tensor
    decode_lengths: torch.Tensor
    sample_tokens: torch.Tensor
    sample_slots: torch.Tensor
    sample_indices: torch.Tensor
    tile_rows: torch.Tensor
    tile_tokens: torch.Tensor
    token_ids: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor

    def unpack(self, *, dependent: bool = False) -> None:
        """Launch the step's first kernel."""
        at = {name: offset for name, (offset, _) in self._columns.items()}
        options: dict[str, int | bool] = {"launch_pdl": True} if dependent else {}
        unpack_kernel[(PROGRAMS,)](
            self._messages, self.step, self._messages.stride(0), RING, self._message, self.state, self.state.stride(0),
            ROW_COLUMNS=len(ROW_COLUMNS), ROW_WIDTH=at["first_positions"] - at["row_slots"], FIRST_ROW=at["row_slots"],
            TILE_ROWS=at["tile_rows"], TILE_TOKENS=at["tile_tokens"], TOKEN_IDS=at["token_ids"],
            TOKEN_SLOTS=at["token_slots"], POSITIONS=at["positions"], PAIRS=at["pairs"], BLOCK=256, HEADER=HEADER,
            ENTRY=ENTRY, DEPENDENT=dependent, num_warps=4, **options,
        )  # fmt: skip

    def write(self, plan: StepPlan, pairs: "Pairs", tile_tokens: int) -> int:
        """Write the plan's message and return its entry. The caller sees to it that the entry is not in use.

        Args:
            tile_tokens: new tokens of a prefill tile; tiles with the longest context come first.
        """
        entry = self.written % RING
        self.written += 1
        message = self._host[entry]
        rows, tokens = len(plan.slots), int(plan.query_starts[-1])

        def put(name: str, values: NDArray[np.integer]) -> None:
            offset = self._columns[name][0]
            message[offset : offset + len(values)] = values

        put("row_slots", plan.slots)
        put("first_positions", plan.first_position)
        put("query_starts", plan.query_starts)
        put("decode_lengths", np.where(plan.num_new == 1, plan.first_position + 1, 0))
        samples = plan.samples
        put("sample_tokens", plan.query_starts[1:][samples] - 1)
        put("sample_slots", plan.slots[samples])
        ends = plan.first_position + plan.num_new
        put("sample_indices", (ends - pairs.prompts[plan.slots])[samples])
        put("token_ids", plan.token_ids)
        if tokens == rows:
            tiles = 0
            put("token_slots", plan.slots)
            put("positions", plan.first_position)
        else:
            slots = np.repeat(plan.slots, plan.num_new)
            offsets = np.repeat(plan.first_position - plan.query_starts[:-1], plan.num_new)
            positions = np.arange(tokens, dtype=np.int32) + offsets
            if (plan.first_position < plan.num_cached).any():  # in shared blocks already: not written again
                slots = np.where(positions < np.repeat(plan.num_cached, plan.num_new), -1 - slots, slots)
            put("token_slots", slots)
            put("positions", positions)
            long = np.flatnonzero(plan.num_new > 1)
            counts = -(-plan.num_new[long] // tile_tokens)
            tile_rows = np.repeat(long, counts)
            firsts = np.arange(len(tile_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = firsts.astype(np.int32) * tile_tokens
            order = np.argsort(-(plan.first_position[tile_rows] + starts), kind="stable")
            tiles = len(order)
            put("tile_rows", tile_rows[order])
            put("tile_tokens", starts[order])
        flat = pairs.take()
        put("pairs", flat)
        message[:5] = tokens, rows, int(samples.sum()), tiles, len(flat) // 2
        return entry


class Pairs:
    """Changes of the slot state that the next message carries."""

    def __init__(self, sizes: Sizes, sharing: Sharing) -> None:
        self._sizes = sizes
        self._sharing = sharing
        self._shared: dict[int, int] = {}  # splits that groups read, by slot, as the device knows it
        self._width = PARAMETERS + sizes.blocks
        self._parts: list[Int32s] = []
        self._lengths = np.zeros(sizes.rows, np.int32)  # blocks in each slot's table
        self.prompts = np.zeros(sizes.rows, np.int32)  # prompt length of each slot
        self._introduced: set[int] = set()
        self._again = False  # a slot was introduced twice since the last message

    def introduce(self, row: Row) -> None:
        values = np.concatenate([slot_parameters(row), row.block_ids]).astype(np.int32)
        self._add(row.slot * self._width + np.arange(len(values)), values)
        self._lengths[row.slot] = len(row.block_ids)
        self.prompts[row.slot] = row.num_prompt
        self._again |= row.slot in self._introduced
        self._introduced.add(row.slot)

    def extend(self, slots: Iterable[int], counts: Sequence[int], blocks: Int32s) -> None:
        done = 0
        for slot, count in zip(slots, counts):
            first = slot * self._width + PARAMETERS + int(self._lengths[slot])
            self._add(first + np.arange(count), blocks[done : done + count])
            self._lengths[slot] += count
            done += count

    def share(self) -> None:
        """Tell the device of groups, if they have changed."""
        if not self._sharing.changed:
            return
        self._sharing.changed = False
        groups, items, number, _ = self._sizes.group_area
        shared, records, listed = self._sharing.table()
        for record in records:
            self._add(groups + int(record[0]) * RECORD + np.arange(RECORD), record[1:])
        self._add(items + np.arange(len(listed)), listed)
        self._add(np.array([number]), np.array([len(listed)], np.int32))
        # A slot introduced in this message has 0 from its introduction, so every value is said again.
        slots = sorted(self._shared.keys() | shared.keys())
        self._shared = shared
        column = np.array([shared.get(slot, 0) for slot in slots], np.int32)
        self._add(np.array(slots, np.int64) * self._width + SHARED_COLUMN, column)
        self._again = True

    def take(self) -> Int32s:
        """All changes so far, (flat index, value) after (flat index, value), the latest of each index only."""
        if not self._parts:
            return np.empty(0, np.int32)
        flat = np.concatenate(self._parts)
        if self._again:  # the order of application is open, so the latest change of a place must stand alone
            pairs = flat.reshape(-1, 2)[::-1]
            flat = pairs[np.unique(pairs[:, 0], return_index=True)[1]].ravel()
        self._parts.clear()
        self._introduced.clear()
        self._again = False
        return flat

    def _add(self, at: NDArray[np.integer], values: Int32s) -> None:
        flat = np.empty(2 * len(values), np.int32)
        flat[0::2], flat[1::2] = at, values
        self._parts.append(flat)
