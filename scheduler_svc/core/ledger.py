"""What speculation may cost: tokens computed, and tokens computed or expected to be computed again.

The price of a token that will be computed again rises as the allowance is used up: cheap while much is left, so that
idle blocks are put to use, dear at its end, so that the last of it goes to what gains most. That is the threshold of
the online knapsack problem (Zhou, Chakrabarty, Lukose: Budget Constrained Bidding in Keyword Auctions and Online
Knapsack Problems, 2008).
"""

from dataclasses import dataclass

MAX_WASTE = 0.13  # of all work, in tokens computed again
LOW_PRICE, HIGH_PRICE = 0.1, 0.5  # tokens gained for each one computed again, by an untouched and a used allowance


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
        allowance = MAX_WASTE * (self.work + work_ahead)
        if self.waste + waste > allowance:
            return False
        used = max(0.0, self.waste + waste) / allowance if allowance else 0.0
        price: float = LOW_PRICE * (HIGH_PRICE / LOW_PRICE) ** used
        return gain >= price * waste
