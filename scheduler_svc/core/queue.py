"""Who waits, and who is next: by priority with ageing, or tenants in turn.

Knows sequences that wait and in which order they go; does not know why they cannot run. An aged priority is
`priority + waited / ageing_s`; the order of two waiting sequences by it never changes with time, so a heap keeps it.
A parked sequence waits for a block that another row is computing and comes back when that block is there or lost.
Invariant: `num_sequences` and `num_tokens` count every waiting sequence once, parked ones too.
"""

import heapq
from collections.abc import Iterable, Iterator

from scheduler_svc.core.sequence import Phase, Sequence

_Entry = tuple[float, int, int, Sequence]  # rank, order, stamp


class WaitingQueue:
    """Args: ageing_s, fair_tenants: see CoreConfig."""

    def __init__(self, ageing_s: float, fair_tenants: bool) -> None:
        self._ageing_s = ageing_s
        self._fair = fair_tenants
        self._heaps: dict[str, list[_Entry]] = {}
        self._parked: dict[bytes, list[Sequence]] = {}
        self._where: dict[int, int | bytes] = {}  # order -> stamp of its entry in a heap, or digest it is parked on
        self._next_stamp = 0
        self.service: dict[str, float] = {}  # tokens given to each tenant
        self.num_tokens = 0
        self.num_output_tokens = 0  # that all of them may still generate

    @property
    def num_sequences(self) -> int:
        return len(self._where)

    @property
    def num_parked(self) -> int:
        return sum(len(parked) for parked in self._parked.values())

    def holds(self, sequence: Sequence) -> bool:
        return sequence.order in self._where

    def parked_on(self) -> list[bytes]:
        """The blocks that parked sequences wait for."""
        return list(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps.values():
            yield from (entry[3] for entry in heap if self._stands(entry))
        for parked in self._parked.values():
            yield from parked

    def push(self, sequence: Sequence) -> None:
        """The sequence waits, at its place by priority and age."""
        assert sequence.phase is Phase.WAITING and sequence.order not in self._where
        self.num_tokens += len(sequence.tokens)
        self.num_output_tokens += sequence.limit - len(sequence.tokens)
        self._enqueue(sequence)

    def head(self) -> Sequence | None:
        """The next sequence to run; parked ones are passed over."""
        if not self._fair:
            return self._top("")
        tops = [(self.service[tenant], tenant, top) for tenant in list(self._heaps) if (top := self._top(tenant))]
        return min(tops, key=lambda entry: entry[:2])[2] if tops else None

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no more: it runs, or has ended."""
        place = self._where.pop(sequence.order)
        self.num_tokens -= len(sequence.tokens)
        self.num_output_tokens -= sequence.limit - len(sequence.tokens)
        if isinstance(place, bytes):
            parked = self._parked[place]
            parked.remove(sequence)
            if not parked:
                del self._parked[place]

    def park(self, sequence: Sequence, digest: bytes) -> None:
        """Pass the sequence over until `wake(digest)`."""
        self._where[sequence.order] = digest
        self._parked.setdefault(digest, []).append(sequence)

    def wake(self, digests: Iterable[bytes]) -> None:
        if self._parked:
            for digest in digests:
                for sequence in self._parked.pop(digest, ()):
                    self._enqueue(sequence)

    def wake_all(self) -> None:
        self.wake(list(self._parked))

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant was given this many tokens of work (or, negative, did not use them)."""
        if self._fair:
            self.service[tenant] = self.service.get(tenant, 0.0) + tokens

    def _enqueue(self, sequence: Sequence) -> None:
        request = sequence.request
        age = sequence.arrival / self._ageing_s if self._ageing_s else 0.0
        tenant = request.tenant if self._fair else ""
        heap = self._heaps.get(tenant)
        if heap is None:
            # A tenant that comes back has not saved up for the time that it was away.
            floor = min((self.service.get(name, 0.0) for name in self._heaps), default=0.0)
            self.service[tenant] = max(self.service.get(tenant, 0.0), floor)
            heap = self._heaps[tenant] = []
        self._where[sequence.order] = stamp = self._next_stamp
        self._next_stamp += 1
        heapq.heappush(heap, (age - request.priority, sequence.order, stamp, sequence))

    def _top(self, tenant: str) -> Sequence | None:
        heap = self._heaps.get(tenant)
        while heap:
            if self._stands(heap[0]):
                return heap[0][3]
            heapq.heappop(heap)
        self._heaps.pop(tenant, None)
        return None

    def _stands(self, entry: _Entry) -> bool:
        """A heap keeps entries of sequences that have gone, or gone and come back, until they are at its top."""
        return self._where.get(entry[1]) == entry[2]
