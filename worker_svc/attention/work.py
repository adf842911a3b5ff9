"""A step's attention as a flat list of work items: (tile of queries, split of keys).

Knows rows, positions and block tables; all of it is integers, nothing is attended here. Keys are cut at absolute
multiples of SPLIT, so which items a query has, and in which order they are folded, depends on its position alone.
Invariant: every query position of the step is in exactly one tile; a tile's items cover every key that one of its
queries may see, ascending.

    tiles   num_new 1: one query each; else up to TILE consecutive queries of one row
    items   split by split: first the first split of every tile, then the second of every tile that has one, ..
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.step_inputs import HostStep

SPLIT = 256
TILE = 32
MAX_ITEMS = 64  # of one pass, which bounds its memory; a single longer tile exceeds it

Ints = NDArray[np.integer]


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """Tiles of one height that are attended together: N tiles of Q queries, W items."""

    tokens_NQ: Tensor  # int64, index into the step's tokens; a tile's last query repeats to fill it
    valid_NQ: Tensor | None  # bool, None: all
    in_order: bool  # tokens_NQ is 0, 1, 2, ..
    item_tiles_W: Tensor  # int64
    keys_W: Tensor  # int64, gather indices: [W, K, SPLIT / block] into blocks, or [W, K, SPLIT] into positions
    hidden_WQS: Tensor  # bool, keys a query may not see
    bounds: tuple[tuple[int, int], ...]  # items of each rank of split: [begin, end)
    folded: tuple[Tensor, ...]  # tiles of each rank of split but the first


def passes(host: HostStep, *, block_size: int, num_kv_heads: int, null_block: int, window: int) -> tuple[Pass, ...]:
    """The work of one kind of layer in one step."""
    made = []
    for rows, height in ((host.num_new == 1, 1), (host.num_new > 1, TILE)):
        for tiles in _tile_groups(host, np.flatnonzero(rows), height, window):
            made.append(_pass(host, tiles, height, block_size, num_kv_heads, null_block, window))
    return tuple(made)


@dataclass(frozen=True, eq=False, slots=True)
class _Tiles:
    row_N: Ints
    first_N: Ints  # position of the first query
    count_N: Ints  # real queries
    first_split_N: Ints
    splits_N: Ints


def _tile_groups(host: HostStep, rows: Ints, height: int, window: int) -> Iterator[_Tiles]:
    """All tiles of these rows, in groups of bounded work."""
    per_row = -(-host.num_new[rows] // height)
    row = np.repeat(rows, per_row)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    first = host.first_position[row] + nth * height
    count = np.minimum(height, host.num_new[row] - nth * height)
    first_split = np.maximum(0, first - window + 1) // SPLIT if window else np.zeros_like(first)
    splits = (first + count - 1) // SPLIT + 1 - first_split
    ends = np.cumsum(splits)
    begin = 0
    while begin < len(row):
        base = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + MAX_ITEMS, side="right")))
        part = slice(begin, end)
        yield _Tiles(row[part], first[part], count[part], first_split[part], splits[part])
        begin = end


def _pass(
    host: HostStep, tiles: _Tiles, height: int, block_size: int, num_kv_heads: int, null_block: int, window: int
) -> Pass:
    offsets = np.minimum(np.arange(height), tiles.count_N[:, None] - 1)
    position_NQ = tiles.first_N[:, None] + offsets
    tokens_NQ = (host.query_starts[tiles.row_N] - host.first_position[tiles.row_N])[:, None] + position_NQ
    item_tiles, item_splits, bounds, folded = _items(tiles)
    key_WS = item_splits[:, None] * SPLIT + np.arange(SPLIT)
    hidden_WQS = key_WS[:, None, :] > position_NQ[item_tiles][:, :, None]
    if window:
        hidden_WQS |= key_WS[:, None, :] <= position_NQ[item_tiles][:, :, None] - window
    last_position = tiles.first_N + tiles.count_N - 1
    keys = _gather_indices(
        host.block_tables[tiles.row_N[item_tiles]],
        item_splits,
        last_position[item_tiles],
        block_size,
        num_kv_heads,
        null_block,
    )
    full = bool((tiles.count_N == height).all())
    return Pass(
        tokens_NQ=torch.from_numpy(tokens_NQ.astype(np.int64)),
        valid_NQ=None if full else torch.from_numpy(np.arange(height) < tiles.count_N[:, None]),
        in_order=full and tokens_NQ.size == host.num_tokens,
        item_tiles_W=torch.from_numpy(item_tiles.astype(np.int64)),
        keys_W=torch.from_numpy(keys.astype(np.int64)),
        hidden_WQS=torch.from_numpy(hidden_WQS),
        bounds=bounds,
        folded=folded,
    )


def _items(tiles: _Tiles) -> tuple[Ints, Ints, tuple[tuple[int, int], ...], tuple[Tensor, ...]]:
    """Items split by split: tile and absolute split of each, and where each rank of split begins and ends."""
    item_tiles, item_splits, bounds, folded = [], [], [], []
    begin = 0
    for nth in range(int(tiles.splits_N.max())):
        having = np.flatnonzero(tiles.splits_N > nth)
        item_tiles.append(having)
        item_splits.append(tiles.first_split_N[having] + nth)
        bounds.append((begin, begin + len(having)))
        begin += len(having)
        if nth:
            folded.append(torch.from_numpy(having.astype(np.int64)))
    return np.concatenate(item_tiles), np.concatenate(item_splits), tuple(bounds), tuple(folded)


def _gather_indices(
    tables_WB: Ints, split_W: Ints, last_W: Ints, block_size: int, num_kv_heads: int, null_block: int
) -> Ints:
    """Where an item's keys lie, kv head by kv head; past the tile's last block, in the null block."""
    heads = np.arange(num_kv_heads)
    if SPLIT % block_size == 0:
        per_split = SPLIT // block_size
        block_WJ = split_W[:, None] * per_split + np.arange(per_split)
        ids = _block_ids(tables_WB, block_WJ, last_W // block_size, null_block)
        return np.asarray(ids[:, None, :] * num_kv_heads + heads[:, None])
    key_WS = split_W[:, None] * SPLIT + np.arange(SPLIT)
    ids = _block_ids(tables_WB, key_WS // block_size, last_W // block_size, null_block)
    return np.asarray(
        (ids[:, None, :] * num_kv_heads + heads[:, None]) * block_size + (key_WS % block_size)[:, None, :]
    )


def _block_ids(tables_WB: Ints, block_WJ: Ints, last_block_W: Ints, null_block: int) -> Ints:
    inside = np.minimum(block_WJ, tables_WB.shape[1] - 1)
    ids = np.take_along_axis(tables_WB, inside, axis=1)
    return np.asarray(np.where(block_WJ <= last_block_W[:, None], ids, null_block))
