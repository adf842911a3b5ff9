"""What the core counted. Plain numbers; names say the unit."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Sums since the start."""

    accepted: int = 0
    refused: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # choices by reason
    steps: int = 0
    aborted_epochs: int = 0
    late_results: int = 0
    scheduled_tokens: int = 0  # tokens of all batches
    scheduled_prompt_tokens: int = 0  # of them, tokens below num_prompt
    generated_tokens: int = 0
    discarded_tokens: int = 0  # computed for rows that had ended
    preemptions: int = 0
    recomputed_tokens: int = 0  # known tokens that had keys and values before a preemption, scheduled again
    prefix_queries: int = 0  # prompt tokens looked up at first admissions
    prefix_hits: int = 0  # of them found
    run_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """The core at one moment.

    `waiting_for` counts waiting choices by what they wait for: slots, blocks, budget, leader (another row computes
    their prefix), queue (those before them).
    """

    running: int
    waiting: int
    waiting_tokens: int
    waiting_for: dict[str, int]
    steps_in_flight: int
    blocks: int
    blocks_free: int
    blocks_cached: int  # unreferenced, found by content
    blocks_held: int  # of ended rows, until a step in flight is done
    draining: bool
    counters: Counters
