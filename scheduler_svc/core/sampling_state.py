"""The core's copy of a row's sampling state, as an introduction: all that a worker must know to draw its next token.

Seed, choice and output index key the randomness, and the index follows from the tokens; so whoever is given this Row
draws the same token, first time or after a preemption, here or on a fresh worker.
"""

from protos.step import Int32s, Row
from scheduler_svc.core.sequence import Sequence


def introduce(sequence: Sequence, tokens: Int32s, blocks: Int32s, num_computed: int, num_cached: int) -> Row:
    """The row of a sequence that has just been given its slot."""
    request = sequence.request
    return Row(
        slot=sequence.slot,
        name=request.request_id if request.n == 1 else f"{request.request_id}/{sequence.choice}",
        token_ids=tokens,
        num_prompt=sequence.num_prompt,
        num_computed=num_computed,
        block_ids=blocks,
        seed=request.seed,
        choice=sequence.choice,
        sampling=request.sampling,
        prompt_logprobs=request.prompt_logprobs if sequence.asked_scores else None,
        num_cached=num_cached,
    )
