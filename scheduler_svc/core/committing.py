"""What a step's result means: counts advance, tokens are kept, stop rules end choices, columns become events.

Knows the columns of a result and which rows the step computed; a result of a row that has ended meanwhile is thrown
away. Python touches only rows that end, chunks of prompts and rows that ask for scores or logits.
"""

from collections.abc import Callable

import numpy as np

from protos.step import NO_FLOATS, NO_INTS, Floats, Int32s, StepResult
from scheduler_svc.core.batching import Step
from scheduler_svc.core.events import FinishReason, LogitsRow, PromptScores, Tokens
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.rows import Bools, Int64s
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stopping import is_stop

End = Callable[[Sequence, FinishReason, int | None], None]


class Committer:
    """Args: end(sequence, reason, stop_token_id): ends a running choice; its counts are up to date."""

    def __init__(self, residency: Residency, end: End) -> None:
        self._residency = residency
        self._end = end

    def commit(self, step: Step, result: StepResult) -> tuple[Tokens, list[PromptScores], list[LogitsRow]]:
        """Apply the result of the oldest step in flight, which is no longer among them."""
        rows, counters = self._residency.rows, self._residency.counters
        self._fail(step, result.failed_slots)
        alive: Bools = rows.serial[step.slots] == step.serials
        everyone = bool(alive.all())
        if everyone:
            rows.computed[step.slots] += 1 if step.num_new is None else step.num_new
        else:
            rows.computed[step.slots[alive]] += 1 if step.num_new is None else step.num_new[alive]
        scores = self._take_scores(step, result)
        for chunk in step.chunks:
            if chunk.sequence.serial == chunk.serial:
                self._residency.acknowledge(chunk.sequence)
        tokens, logits = self._take_tokens(step, result, None if everyone else step.sampling(alive))
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.scores_only and sequence.serial == chunk.serial and not sequence.wants_scores:
                self._end(sequence, FinishReason.LENGTH, None)
        self._residency.settle(step.seq)
        counters.run_ms += result.run_ms
        counters.wait_ms += result.wait_ms
        return tokens, scores, logits

    def _fail(self, step: Step, failed_slots: Int32s) -> None:
        """Rows whose logits held a NaN end; nothing that they computed is trusted."""
        for slot in failed_slots.tolist():
            row = int(np.searchsorted(step.slots, slot))
            assert row < len(step.slots) and step.slots[row] == slot, f"slot {slot} failed and was not computed"
            sequence = self._residency.rows.sequences[slot]
            if sequence is not None and sequence.serial == step.serials[row]:
                self._end(sequence, FinishReason.NAN, None)

    def _take_tokens(self, step: Step, result: StepResult, alive: Bools | None) -> tuple[Tokens, list[LogitsRow]]:
        """Keep the tokens of the sampling rows that are alive (None: all), and end those that they end."""
        rows, counters = self._residency.rows, self._residency.counters
        slots, token_ids, logprobs = step.sampling(step.slots), result.token_ids, result.logprobs
        assert len(token_ids) == len(slots), f"{len(token_ids)} tokens for {len(slots)} sampling rows"
        logprobs = logprobs if len(logprobs) else np.zeros(len(slots), np.float32)
        alternatives, logits = self._alternatives(step, result, alive), self._take_logits(step, result, alive)
        if alive is not None:
            counters.discarded_tokens += len(slots) - int(alive.sum())
            slots, token_ids, logprobs = slots[alive], token_ids[alive], logprobs[alive]
        if not len(slots):
            return Tokens(), logits
        known = rows.known[slots]
        rows.reserve(int(known.max()) + 1)
        rows.tokens[slots, known] = token_ids
        rows.known[slots] = known = known + 1
        counters.generated_tokens += len(slots)
        tokens = Tokens(rows.key[slots], rows.choice[slots].astype(np.int32), token_ids, logprobs, *alternatives)
        over = known >= rows.limit[slots]
        over |= self._residency.stops.candidates(token_ids)
        if over.any():
            self._stop(slots[over], token_ids[over])
        return tokens, logits

    def _stop(self, slots: Int64s, token_ids: Int32s) -> None:
        """End those of the rows that their newest token ends."""
        rows = self._residency.rows
        for slot, token_id in zip(slots.tolist(), token_ids.tolist()):
            sequence = rows.sequences[slot]
            assert sequence is not None
            known, min_tokens = int(rows.known[slot]), sequence.request.sampling.min_tokens
            if is_stop(token_id, known - 1 - sequence.num_prompt, sequence.stop_set, min_tokens):
                self._end(sequence, FinishReason.STOP, token_id)
            elif known >= sequence.limit:
                self._end(sequence, FinishReason.LENGTH, None)

    def _alternatives(self, step: Step, result: StepResult, alive: Bools | None) -> tuple[Int32s, Int32s, Floats]:
        if step.alternatives is None:
            slots = step.sampling(step.slots) if alive is None else step.sampling(step.slots)[alive]
            return np.zeros(len(slots), np.int32), NO_INTS, NO_FLOATS
        counts = step.alternatives
        ids, values = result.alternative_ids, result.alternative_logprobs
        assert len(ids) == counts.sum(), f"{len(ids)} alternatives; the rows asked for {counts.sum()}"
        if alive is not None:
            kept = np.repeat(alive, counts)
            counts, ids, values = counts[alive], ids[kept], values[kept]
        return counts.astype(np.int32), ids, values

    def _take_logits(self, step: Step, result: StepResult, alive: Bools | None) -> list[LogitsRow]:
        if step.logits is None or result.logits is None:
            return []
        rows, slots = self._residency.rows, step.sampling(step.slots)
        asking = np.flatnonzero(step.logits)
        assert len(result.logits) == len(asking), f"{len(result.logits)} rows of logits; {len(asking)} were asked for"
        return [
            LogitsRow(int(rows.key[slots[row]]), int(rows.choice[slots[row]]), result.logits[line])
            for line, row in enumerate(asking.tolist())
            if alive is None or alive[row]
        ]

    def _take_scores(self, step: Step, result: StepResult) -> list[PromptScores]:
        """Scores of prompt tokens that the caller does not have yet; a recomputed prompt answers some again."""
        scores: list[PromptScores] = []
        at = at_alternative = 0
        for chunk in step.chunks:
            first, count, width = at, chunk.scores, chunk.score_width
            first_alternative = at_alternative
            at += count
            at_alternative += count * width
            sequence = chunk.sequence
            if not count or sequence.serial != chunk.serial:
                continue
            skip = sequence.next_score - (chunk.start + 1)
            assert skip >= 0, (
                f"scores of {sequence.request.request_id} from {chunk.start + 1}, not {sequence.next_score}"
            )
            if skip >= count:
                continue
            some = slice(first_alternative + skip * width, at_alternative)
            scores.append(
                PromptScores(
                    sequence.key,
                    sequence.next_score,
                    result.prompt_logprobs[first + skip : at],
                    result.prompt_alternative_ids[some],
                    result.prompt_alternative_logprobs[some],
                )
            )
            sequence.next_score = chunk.start + count + 1
        assert at == len(result.prompt_logprobs), f"{len(result.prompt_logprobs)} prompt scores; {at} were asked for"
        return scores
