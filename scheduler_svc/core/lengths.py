"""How long outputs will get, learned from those that ended: what the admission forecast knows of the future.

A choice that no token can stop runs to max_tokens. Any other is expected to do as recent ones did that got at least as
far. Each gets a quantile of its own (from its order number, spread evenly), so that rows together end as the lengths
are distributed, a few at every moment, and not all at their mean. A forecast that proves wrong costs a preemption,
never a token.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque

import numpy as np

from scheduler_svc.core.rows import Bools, Int64s

WINDOW = 512  # lengths remembered
FIRST_GUESS = 256  # before anything has ended
FEW = 8  # lengths that are too few to know
GOLDEN = (5**0.5 - 1) / 2  # its multiples fill the unit interval evenly


class LengthHistory:
    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._ranked: list[int] = []  # the same, ascending
        self._column: Int64s | None = None  # the same as an array, once it is needed
        self._sum = self._sum_of_squares = 0

    def add(self, length: int) -> None:
        """A choice that could have stopped at any token has ended with so many."""
        if len(self._recent) == WINDOW:
            gone = self._recent.popleft()
            del self._ranked[bisect_left(self._ranked, gone)]
            self._sum -= gone
            self._sum_of_squares -= gone * gone
        self._recent.append(length)
        insort(self._ranked, length)
        self._sum += length
        self._sum_of_squares += length * length
        self._column = None

    def expected(self, generated: Int64s, max_tokens: Int64s, may_stop: Bools, order: Int64s) -> Int64s:
        """Output tokens that rows are expected to end with; more than they have, at most max_tokens."""
        if not may_stop.any():
            return max_tokens
        if len(self._recent) < FEW:
            guess = generated + np.maximum(FIRST_GUESS, generated)
        else:
            if self._column is None:
                self._column = np.array(self._ranked, np.int64)
            above = np.searchsorted(self._column, generated, side="right")
            count = len(self._column) - above
            pick = above + (count * (order * GOLDEN % 1.0)).astype(np.int64)
            guess = np.where(count > 0, self._column[np.minimum(pick, len(self._column) - 1)], 2 * generated)
        guess = np.clip(guess, generated + 1, max_tokens)
        lengths: Int64s = np.where(may_stop, guess, max_tokens)
        return lengths

    def expected_of_one(self, generated: int, max_tokens: int, may_stop: bool, order: int) -> int:
        """The same for one row, without arrays."""
        if not may_stop:
            return max_tokens
        if len(self._recent) < FEW:
            guess = generated + max(FIRST_GUESS, generated)
        else:
            above = bisect_right(self._ranked, generated)
            count = len(self._ranked) - above
            guess = self._ranked[above + int(count * (order * GOLDEN % 1.0))] if count else 2 * generated
        return min(max(guess, generated + 1), max_tokens)

    def typical(self) -> int:
        """The mean of recent lengths."""
        return self._sum // len(self._recent) if len(self._recent) >= FEW else FIRST_GUESS

    def spread(self) -> float:
        """Standard deviation of recent lengths, in tokens."""
        count = len(self._recent)
        return float((count * self._sum_of_squares - self._sum**2) ** 0.5) / count if count >= FEW else 0.0
