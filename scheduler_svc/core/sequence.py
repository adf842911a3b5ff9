"""One choice of a request on its way through the core.

A sequence owns what is rare or irregular: its request, its prefix digests, what the caller was told. While it runs, its
counts and tokens lie in the columns of rows.Rows at `slot`; while it waits, `tokens` holds every known token.

    WAITING -> PREFILL -> DECODE -> LEAVING -> ENDED
       ^__________________________________|

LEAVING: the workers forget the slot with the next batch, but steps in flight still compute it. It is either preempted
(it waits again once they are committed) or its last token is on its way.
"""

from dataclasses import dataclass, field
from enum import Enum

from protos.step import NO_INTS, Int32s
from scheduler_svc.core.request import Request


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"  # more than one known token is not scheduled yet
    DECODE = "decode"  # takes one token a step, unlisted
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Sequence:
    """`order` numbers sequences by arrival: the smaller is the older, and stays so through preemptions."""

    request: Request
    choice: int
    order: int
    tokens: Int32s
    stop_set: frozenset[int]
    stop_ids: Int32s  # the same, sorted
    arrival: float
    phase: Phase = Phase.WAITING
    slot: int = -1
    serial: int = -1  # of its current stay in a slot
    preempted: bool = False  # LEAVING, to wait again
    leaves_after: int = -1  # LEAVING: the last step that may hold it
    admitted_at: float | None = None
    cached_tokens: int = 0  # prompt tokens found at the first admission
    reserved: int = 0  # tokens charged to its tenant
    preemptions: int = 0
    num_done: int = 0  # tokens that had keys and values when it was last preempted
    expected_waste: int = 0  # tokens that admission expects to compute again, since it will not fit to its end
    next_score: int = 1  # prompt token whose score the caller gets next
    asked_scores: bool = False  # this stay's introduction asked for prompt scores
    chain: list[bytes] = field(default_factory=list)  # digests of its full blocks
    pending: list[bytes] = field(default_factory=list)  # those that it leads: being computed, not yet in the index
    blocked: str = ""  # why it waits

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def limit(self) -> int:
        """Known tokens at which the choice has its max_tokens."""
        return self.num_prompt + self.request.max_tokens

    @property
    def num_left(self) -> int:
        """Output tokens that a waiting sequence may still get."""
        return self.limit - len(self.tokens)

    @property
    def scores_only(self) -> bool:
        return self.request.max_tokens == 0

    @property
    def wants_scores(self) -> bool:
        """Prompt scores are still owed; they belong to choice 0."""
        return self.request.prompt_logprobs is not None and self.choice == 0 and self.next_score < self.num_prompt

    @property
    def to_compute(self) -> int:
        """Tokens of a waiting sequence that need keys and values before it decodes; the last score needs one fewer."""
        return self.num_prompt - 1 if self.scores_only else len(self.tokens)

    def forget_tokens(self) -> None:
        self.tokens = NO_INTS
