"""The promises between the parts of the core, as code. Reads everything, changes nothing, knows no policy."""

from collections import Counter

import numpy as np

from scheduler_svc.core.queue import token_steps
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.rows import DECODE, FREE, LEAVING, PREFILL
from scheduler_svc.core.sequence import Phase


def check_residency(residency: Residency) -> None:
    _check_pool(residency)
    _check_rows(residency)
    _check_index(residency)
    _check_queue(residency)


def _check_pool(residency: Residency) -> None:
    """Every block is free, idle or referenced, and every reference has its table."""
    pool, rows = residency.pool, residency.rows
    counted: Counter[int] = Counter()
    for slot in np.flatnonzero(rows.serial >= 0).tolist():
        blocks = rows.blocks(slot).tolist()
        assert len(set(blocks)) == len(blocks), f"slot {slot} has a block twice"
        counted.update(blocks)
    for blocks in residency.held_blocks():
        counted.update(blocks.tolist())
    references = {block: int(count) for block, count in enumerate(pool.references) if count}
    assert references == dict(counted), f"references {references}, tables {dict(counted)}"
    free = pool.free_blocks().tolist()
    assert len(set(free)) == len(free) == pool.num_free
    assert not set(free) & set(pool.idle) and not (set(free) | set(pool.idle)) & set(counted)
    assert len(free) + len(pool.idle) + len(counted) == pool.num_blocks, "a block is lost"
    assert all(pool.indexed[block] for block in pool.idle) and not pool.indexed[free].any()


def _check_rows(residency: Residency) -> None:
    """Counts are in order, tables are long enough, and nobody writes to a block that another may read."""
    rows, pool, config = residency.rows, residency.pool, residency.config
    running = [sequence for sequence in rows.sequences if sequence is not None]
    assert residency.end_blocks == sum(map(residency.blocks_at_end, running))
    for slot, sequence in enumerate(rows.sequences):
        if sequence is None:
            assert rows.serial[slot] == -1 and rows.phase[slot] == FREE and not rows.introduced[slot]
            continue
        assert sequence.slot == slot and sequence.serial == rows.serial[slot]
        expected = {PREFILL: Phase.PREFILL, DECODE: Phase.DECODE, LEAVING: Phase.LEAVING}
        assert expected[int(rows.phase[slot])] is sequence.phase
        computed, scheduled = int(rows.computed[slot]), int(rows.scheduled[slot])
        told, known, limit = int(rows.told[slot]), int(rows.known[slot]), int(rows.limit[slot])
        assert 0 <= computed <= scheduled <= told and known <= max(limit, sequence.num_prompt), f"slot {slot}"
        assert told <= known if config.sample_at_scheduler else known <= told, (
            f"slot {slot}: told {told}, known {known}"
        )
        assert scheduled <= rows.num_blocks[slot] * config.block_size, f"slot {slot} computes past its blocks"
        assert rows.sent_blocks[slot] <= rows.num_blocks[slot]
        in_flight = sum(step.serials[step.slots == slot].tolist() == [sequence.serial] for step in residency.in_flight)
        if not in_flight:
            assert computed == scheduled, f"slot {slot}: {scheduled - computed} tokens are in no step"
        if sequence.phase is Phase.LEAVING:
            assert not rows.introduced[slot] and residency.in_flight, f"slot {slot} leaves and nothing is in flight"
        writes_from = max(computed, int(rows.num_cached[slot]))
        if writes_from < scheduled:
            writing = rows.table[slot, writes_from // config.block_size : -(-scheduled // config.block_size)]
            assert (pool.references[writing] == 1).all(), f"slot {slot} writes to a shared block of {writing}"
            assert not pool.indexed[writing].any(), f"slot {slot} writes to an indexed block of {writing}"


def _check_index(residency: Residency) -> None:
    """Digests and blocks are one to one; equal digests never name different tokens of live rows."""
    index, pool, rows = residency.index, residency.pool, residency.rows
    by_block = {block: digest for block, digest in enumerate(index.digests) if digest is not None}
    assert by_block == {block: digest for digest, block in index.blocks.items()}
    assert set(by_block) == set(np.flatnonzero(pool.indexed).tolist())
    content: dict[int, bytes] = {}
    size = residency.config.block_size
    for sequence in rows.sequences:
        if sequence is None:
            continue
        slot = sequence.slot
        for i in range(min(int(rows.acknowledged[slot]), int(rows.num_blocks[slot]))):
            block = int(rows.table[slot, i])
            tokens = rows.tokens[slot, i * size : (i + 1) * size].tobytes()
            assert content.setdefault(block, tokens) == tokens, f"block {block} holds two contents"
    leaders = {s.serial: s for s in rows.sequences if s is not None}
    for digest, serial in index.pending.items():
        assert serial in leaders and digest in leaders[serial].pending, "a leader that is gone"
        assert leaders[serial].phase in (Phase.PREFILL, Phase.DECODE)


def _check_queue(residency: Residency) -> None:
    waiting = list(residency.queue)
    assert len(waiting) == len(set(map(id, waiting))) == residency.queue.num_sequences
    assert residency.queue.num_tokens == sum(len(sequence.tokens) for sequence in waiting)
    closed = [sequence for sequence in waiting if not sequence.stop_set]
    assert residency.queue.num_output_tokens == sum(sequence.num_left for sequence in closed)
    assert residency.queue.num_token_steps == sum(token_steps(len(s.tokens), s.num_left) for s in closed)
    for sequence in waiting:
        assert sequence.phase is Phase.WAITING and sequence.slot == -1 and not sequence.pending
    for digest in residency.queue.parked_on():
        assert digest in residency.index.pending, "parked behind nobody"
