"""The pool of KV blocks: who may use which block, and how often.

Knows reference counts and which blocks are indexed by content; does not know tokens or sequences. A block is either
free, idle (indexed, unreferenced, given away last used first gone) or referenced.
Invariant: free + idle + referenced == num_blocks, and references is never negative.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from protos.step import NO_INTS, Int32s


class BlockPool:
    """Args:
    num_blocks: size of the pool.
    evicted: told each indexed block that is about to be used for something else.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks, np.int32)
        self.indexed = np.zeros(num_blocks, bool)
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # [:num_free] are free, the next at the end
        self.num_free = num_blocks
        self.num_evicted = 0
        self._evicted = evicted

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.idle)

    def free_blocks(self) -> Int32s:
        return self._stack[: self.num_free]

    def allocate(self, count: int) -> Int32s:
        """`count` blocks with one reference each. The caller has seen that so many are available."""
        assert count <= self.num_available, f"{count} blocks of {self.num_available}"
        if count == 0:
            return NO_INTS
        for _ in range(count - self.num_free):
            block, _none = self.idle.popitem(last=False)
            self._evicted(block)
            self.indexed[block] = False
            self.num_evicted += 1
            self._push(np.array([block], np.int32))
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self.references[blocks] = 1
        return blocks

    def adopt(self, blocks: Int32s) -> None:
        """One more reference to each of these indexed blocks."""
        assert self.indexed[blocks].all(), "only indexed blocks are shared"
        if self.idle:
            for block in blocks[self.references[blocks] == 0].tolist():
                del self.idle[block]
        self.references[blocks] += 1

    def release(self, blocks: Int32s) -> None:
        """One reference fewer to each, in table order: the end of a prefix goes before its beginning."""
        self.references[blocks] -= 1
        unused = blocks[self.references[blocks] == 0]
        indexed = self.indexed[unused]
        for block in unused[indexed][::-1].tolist():
            self.idle[block] = None
        self._push(unused[~indexed])

    def index(self, block: int) -> None:
        """The block's content is found by its digest from now on."""
        self.indexed[block] = True

    def unindex(self, block: int) -> None:
        """The block's content is no longer to be found."""
        self.indexed[block] = False
        if self.references[block] == 0:
            del self.idle[block]
            self._push(np.array([block], np.int32))

    def _push(self, blocks: Int32s) -> None:
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)
