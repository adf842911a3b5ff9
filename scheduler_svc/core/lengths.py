"""How long outputs will get, learned from those that ended: what the admission forecast knows of the future.

A choice that no token can stop runs to max_tokens. Any other is expected to do as recent ones did that got at least as
far. Each gets a quantile of its own (from its order number, spread evenly), so that rows together end as the lengths
are distributed, a few at every moment, and not all at their mean. A forecast that proves wrong costs a preemption,
never a token.
"""

from collections import deque

import numpy as np

from scheduler_svc.core.rows import Bools, Int64s

WINDOW = 512  # lengths remembered
FIRST_GUESS = 256  # before anything has ended
FEW = 8  # lengths that are too few to know
GOLDEN = (5**0.5 - 1) / 2  # its multiples fill the unit interval evenly


class LengthHistory:
    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._sorted: Int64s | None = None

    def add(self, length: int) -> None:
        """A choice that could have stopped at any token has ended with so many."""
        self._recent.append(length)
        self._sorted = None

    def expected(self, generated: Int64s, max_tokens: Int64s, may_stop: Bools, order: Int64s) -> Int64s:
        """Output tokens that rows are expected to end with; more than they have, at most max_tokens."""
        if not may_stop.any():
            return max_tokens
        if len(self._recent) < FEW:
            guess = generated + np.maximum(FIRST_GUESS, generated)
        else:
            ordered = self._ordered()
            above = np.searchsorted(ordered, generated, side="right")
            count = len(ordered) - above
            pick = above + (count * (order * GOLDEN % 1.0)).astype(np.int64)
            guess = np.where(count > 0, ordered[np.minimum(pick, len(ordered) - 1)], 2 * generated)
        guess = np.clip(guess, generated + 1, max_tokens)
        lengths: Int64s = np.where(may_stop, guess, max_tokens)
        return lengths

    def typical(self) -> int:
        """The mean of recent lengths."""
        return int(np.mean(self._ordered())) if len(self._recent) >= FEW else FIRST_GUESS

    def spread(self) -> float:
        """Standard deviation of recent lengths, in tokens."""
        return float(np.std(self._ordered())) if len(self._recent) >= FEW else 0.0

    def _ordered(self) -> Int64s:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent, np.int64))
        return self._sorted
