"""What speculation may cost: tokens computed, and tokens computed or expected to be computed again."""

from dataclasses import dataclass

MAX_WASTE = 0.12  # of all work, in tokens computed again
MIN_GAIN = 0.35  # tokens gained for each one computed again


@dataclass(slots=True)
class Ledger:
    """Both sums fade, so that old calm buys nothing.

    Args: window: tokens of work after which half is forgotten.
    """

    window: int
    work: float = 0.0
    waste: float = 0.0

    def add_work(self, tokens: int) -> None:
        self.work += tokens
        if self.work > self.window:
            self.work /= 2
            self.waste /= 2

    def allows(self, gain: int, waste: int, work_ahead: int) -> bool:
        """Whether starting something that gains and wastes so many tokens is worth it and within bounds."""
        return gain >= MIN_GAIN * waste and self.waste + waste <= MAX_WASTE * (self.work + work_ahead)
