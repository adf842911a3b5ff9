"""Which rows read the same keys: groups of slots whose block tables begin alike (samples of one prompt, a system
prompt).

Knows block tables as they are introduced; does not know kernels. A group's leading splits are read once for all of its
rows, which changes no bit: the rows of a product do not know each other. Invariant: every slot of a group has the
group's blocks in each of its `splits` leading splits, and has computed all of them before it decodes.

On the device a group is a record of RECORD integers (number of splits, then its slots, -1 where none), and `items`
lists (group, split) as group * SPLITS + split.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.step import Int32s, Row
from worker_svc.cuda.attention import MEMBERS, RECORD, SPLIT, SPLITS

WORTH_ITEMS = 8  # splits not read again, from which on a launch of its own pays


@dataclass(slots=True)
class _Group:
    number: int
    splits: int
    slots: list[int] = field(default_factory=list)


class Sharing:
    """Args:
    max_rows: slots; there are at most half as many groups.
    max_items: bound of the list of (group, split).
    """

    def __init__(self, max_rows: int, max_items: int, block_size: int) -> None:
        self._per_split = SPLIT // block_size
        self._max_items = max_items
        self._free = list(range(max_rows // 2))[::-1]
        self._by_key: dict[bytes, list[_Group]] = {}
        self._of_slot: dict[int, tuple[bytes, _Group]] = {}
        self._splits: dict[int, Int32s] = {}  # [splits, blocks] of each slot that could share
        self._alone: dict[bytes, int] = {}  # a slot that waits for company
        self.changed = False

    def introduce(self, row: Row) -> None:
        """Find company for a row, or let it wait for some."""
        count = min(len(row.token_ids) // SPLIT, len(row.block_ids) // self._per_split, SPLITS)
        if not count or not self._per_split:
            return
        splits = np.asarray(row.block_ids[: count * self._per_split], np.int32).reshape(count, -1)
        key = splits[0].tobytes()
        self._splits[row.slot] = splits
        for group in self._by_key.get(key, []):
            if len(group.slots) < MEMBERS and self._common(group.slots[0], row.slot) >= group.splits:
                self._join(key, group, row.slot)
                return
        other = self._alone.get(key)
        if other is None or not self._free:
            self._alone[key] = row.slot
            return
        del self._alone[key]
        group = _Group(self._free.pop(), self._common(other, row.slot))
        self._by_key.setdefault(key, []).append(group)
        self._join(key, group, other)
        self._join(key, group, row.slot)

    def retire(self, slot: int) -> None:
        self._splits.pop(slot, None)
        found = self._of_slot.pop(slot, None)
        if found is None:
            for key in [key for key, alone in self._alone.items() if alone == slot]:
                del self._alone[key]
            return
        key, group = found
        group.slots.remove(slot)
        self.changed = True
        if len(group.slots) > 1:
            return
        for last in group.slots:
            del self._of_slot[last]
            self._alone.setdefault(key, last)
        self._by_key[key].remove(group)
        if not self._by_key[key]:
            del self._by_key[key]
        self._free.append(group.number)

    def table(self) -> tuple[dict[int, int], Int32s, Int32s]:
        """(shared splits of every slot in a group, [groups, RECORD] with group numbers first, items)."""
        groups = [group for groups in self._by_key.values() for group in groups]
        shared: dict[int, int] = {}
        records: list[Int32s] = []
        items: list[int] = []
        for group in groups:
            if len(items) + group.splits > self._max_items:
                break
            record = np.full(1 + RECORD, -1, np.int32)
            record[0], record[1] = group.number, group.splits
            record[2 : 2 + len(group.slots)] = group.slots
            records.append(record)
            items += [group.number * SPLITS + split for split in range(group.splits)]
            shared |= dict.fromkeys(group.slots, group.splits)
        flat = np.array(records, np.int32).reshape(len(records), 1 + RECORD)
        return shared, flat, np.array(items, np.int32)

    @property
    def worth_it(self) -> bool:
        """Whether reading once saves more than a launch costs; a matter of speed alone."""
        saved = sum(g.splits * (len(g.slots) - 1) for groups in self._by_key.values() for g in groups)
        return saved >= WORTH_ITEMS

    def _join(self, key: bytes, group: _Group, slot: int) -> None:
        group.slots.append(slot)
        self._of_slot[slot] = key, group
        self.changed = True

    def _common(self, a: int, b: int) -> int:
        """Leading splits that two slots have in common."""
        one, two = self._splits[a], self._splits[b]
        n = min(len(one), len(two))
        same = (one[:n] == two[:n]).all(1)
        return n if same.all() else int(same.argmin())
