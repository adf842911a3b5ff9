"""Whether one more sequence fits: a forecast of the pool at every moment that blocks come free.

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


def peak_blocks(outlook: Outlook, block_size: int) -> int:
    """The most blocks that the rows own at once, exact, in O(R x block_size).

    At time t row r owns 1 + floor((position + t) / block_size) - adopted blocks. With position = B q + c and
    t = B a + b the floor is q + a + [c + b >= B], so three sums over the rows still running give the total.
    """
    order = np.argsort(outlook.last)
    time, position = outlook.last[order], outlook.position[order]
    whole, part = np.divmod(position, block_size)
    time_whole, time_part = np.divmod(time, block_size)
    running = np.arange(len(order), 0, -1)
    owned = np.cumsum((whole + 1 - outlook.adopted[order])[::-1])[::-1]
    # carry[i, b]: rows i.. whose position part is at least block_size - b
    parts = np.zeros((len(order), block_size), np.int64)
    parts[np.arange(len(order)), part] = 1
    from_end = parts[::-1].cumsum(axis=0)[::-1]
    carry = np.zeros((len(order), block_size), np.int64)
    carry[:, 1:] = from_end[:, :0:-1].cumsum(axis=1)
    usage = owned + running * time_whole + carry[np.arange(len(order)), time_part]
    return int(usage.max(initial=0))
