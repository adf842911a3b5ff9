"""The pool's future: a forecast of its use at every moment that blocks come free.

Knows where each row stands and where it will end; does not know the pool's contents. Between two endings usage only
grows, so a plan fits if it fits at each ending. The idea of simulating the pool ahead is tokasaurus'.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.rows import Int64s


@dataclass(frozen=True, eq=False, slots=True)
class Outlook:
    """Rows as the forecast sees them, [R] each.

    Row r holds position[r] + t + 1 tokens in step t from now, of which its first adopted[r] blocks are not its own,
    and gives its blocks back after step last[r].
    """

    position: Int64s
    last: Int64s
    adopted: Int64s

    def plus(self, position: int, last: int, adopted: int) -> "Outlook":
        return Outlook(np.append(self.position, position), np.append(self.last, last), np.append(self.adopted, adopted))

    def usage_at_endings(self, block_size: int) -> tuple[Int64s, Int64s]:
        """When rows end, ascending, and the blocks that all rows own just before; exact, in O(R x block_size).

        At time t row r owns 1 + floor((position + t) / block_size) - adopted blocks. With position = B q + c and
        t = B a + b the floor is q + a + [c + b >= B], so three sums over the rows still running give the total.
        """
        order = np.argsort(self.last)
        time, position = self.last[order], self.position[order]
        whole, part = np.divmod(position, block_size)
        time_whole, time_part = np.divmod(time, block_size)
        running, lanes = np.arange(len(order), 0, -1), np.arange(len(order))
        owned = np.cumsum((whole + 1 - self.adopted[order])[::-1])[::-1]
        # carry[i, b]: rows i.. whose position part is at least block_size - b
        parts = np.zeros((len(order), block_size), np.int64)
        parts[lanes, part] = 1
        from_end = parts[::-1].cumsum(axis=0)[::-1]
        carry = np.zeros((len(order), block_size), np.int64)
        carry[:, 1:] = from_end[:, :0:-1].cumsum(axis=1)
        usage: Int64s = owned + running * time_whole + carry[lanes, time_part]
        return time, usage

    def peak(self, block_size: int) -> int:
        """The most blocks that the rows own at once."""
        return int(self.usage_at_endings(block_size)[1].max(initial=0))

    def usage(self, time: int, block_size: int) -> int:
        """Blocks that all rows own in step `time` from now."""
        alive = self.last >= time
        return int(((self.position[alive] + time) // block_size + 1 - self.adopted[alive]).sum())

    def fills_at(self, num_blocks: int, block_size: int) -> int | None:
        """The first step from now in which the rows own more than `num_blocks`; None: they never do."""
        if int(((self.position + self.last) // block_size + 1 - self.adopted).sum()) <= num_blocks:
            return None  # not even if all of them ended at once
        times, usage = self.usage_at_endings(block_size)
        over = np.flatnonzero(usage > num_blocks)
        if not len(over):
            return None
        high = int(times[over[0]])
        low = int(times[over[0] - 1]) if over[0] else -1
        while high - low > 1:
            middle = (low + high) // 2
            if self.usage(middle, block_size) > num_blocks:
                high = middle
            else:
                low = middle
        return high
