"""Whether and when to try again: pure, the clock and the dice are arguments.

Only what says nothing about the request itself is tried again: a connection that went away, a scheduler that is not
there (yet), a full queue that names a time. Everything else is final at once.
"""

from dataclasses import dataclass

from client.errors import Failure


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a lost connection is met.

    patience_s: how long without any progress before the last error is raised; 0 tries once. Progress resets it: a
        stream that moves may be taken up any number of times.
    """

    patience_s: float = 60.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    growth: float = 2.0
    jitter: float = 0.25  # of the backoff, so that many clients of one dead server do not return together


NEVER = RetryPolicy(patience_s=0.0)


def worth_another_try(failure: Failure, attempts: int) -> bool:
    """`attempts` counts those made, this one included.

    A live duplicate of our own id, after the first attempt, is the server not having noticed yet that we were cut off.
    """
    if failure.code == "RESOURCE_EXHAUSTED":
        return failure.retry_after_s is not None  # without a hint it is a message above a limit, which stays above it
    return failure.cut or (failure.code == "ALREADY_EXISTS" and attempts > 1)


def backoff_s(policy: RetryPolicy, failure: Failure, failures: int, dice: float) -> float:
    """Seconds until the next attempt after `failures` without progress; `dice` is uniform in [0, 1)."""
    growing = policy.first_backoff_s * policy.growth ** min(failures - 1, 30)
    wait = min(policy.max_backoff_s, growing) * (1 + policy.jitter * (2 * dice - 1))
    return max(wait, failure.retry_after_s or 0.0)


class Patience:
    """Counts failures since the last progress, for one call or request."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._since = now
        self.failures = 0

    def progressed(self, now: float) -> None:
        self._since = now
        self.failures = 0

    def wait_s(self, failure: Failure, attempts: int, now: float, dice: float) -> float | None:
        """Seconds until the next attempt; None: there shall be none."""
        self.failures += 1
        if not worth_another_try(failure, attempts):
            return None
        wait = backoff_s(self._policy, failure, self.failures, dice)
        return None if now + wait - self._since > self._policy.patience_s else wait
