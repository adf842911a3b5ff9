"""Stop rules on tokens: end-of-sequence ids, stop ids, max_tokens, min_tokens.

A token at output index i (from 0) ends a choice when it is one of its stop ids and i >= min_tokens; a choice that has
max_tokens tokens has ended. When one token does both it was a stop. Stop strings are text and so the front end's.
"""

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from protos.step import Int32s


class StopTable:
    """Which ids would stop some running row: one array lookup for all of a step's tokens.

    Cost in a step does not depend on how many stop ids the rows have.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(1, np.int32)  # by id; the last entry stands for every larger id and stays 0

    def add(self, ids: Int32s) -> None:
        """`ids` are distinct and ascending."""
        if len(ids):
            needed = int(ids[-1]) + 2
            if needed > len(self._counts):
                grown = np.zeros(max(needed, 2 * len(self._counts)), np.int32)
                grown[: len(self._counts)] = self._counts
                self._counts = grown
            self._counts[ids] += 1

    def remove(self, ids: Int32s) -> None:
        if len(ids):
            self._counts[ids] -= 1

    def candidates(self, token_ids: Int32s) -> NDArray[np.bool_]:
        """Which tokens stop at least one row; the caller asks whose."""
        return self._counts.take(token_ids, mode="clip") > 0


def first_stop(output: Int32s, stop_ids: Int32s, min_tokens: int) -> int | None:
    """Index of the first output token that ends the choice."""
    hits = np.flatnonzero(np.isin(output[min_tokens:], stop_ids))
    return min_tokens + int(hits[0]) if len(hits) else None


def is_stop(token_id: int, output_index: int, stop_set: Set[int], min_tokens: int) -> bool:
    return output_index >= min_tokens and token_id in stop_set
