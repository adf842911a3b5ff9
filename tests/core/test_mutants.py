"""Each oracle kills something: the core is broken on purpose, one way at a time, and its check must fail.

The unmutated core passes the same checks, here as the control of each mutant.
"""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler_svc.core import committing, planning, residency, scheduler
from scheduler_svc.core.batching import Draft
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.planning import Planner
from scheduler_svc.core.prefix_cache import PrefixIndex, root_digest
from scheduler_svc.core.request import NeverFits
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Phase
from scheduler_svc.core.stopping import StopTable
from tests.core import test_groups_and_cache as groups
from tests.core import test_pressure as pressure
from tests.core import test_scheduler as basics
from tests.core.engine import Bench
from tests.core.test_histories import check_story, one_event, random_bench
from worker_svc.slots import Contradiction


def random_histories() -> None:
    for seed in range(16):
        rng = np.random.default_rng(seed)
        bench = random_bench(rng)
        for _ in range(100):
            one_event(bench, rng)
        bench.run(max_steps=5000)
        check_story(bench)


def unchecked_preemptions(depth: int = 2) -> None:
    """No invariant helps: only what the callers are told."""
    for blocks in (20, 24):
        bench = Bench(num_blocks=blocks, forecast=False, pipeline_depth=depth, check=False)
        for _ in range(6):
            bench.submit(20, max_tokens=50)
        bench.run(max_steps=5000)
        bench.assert_solo()


def exact_pools() -> None:
    basics.test_a_request_runs_in_a_pool_of_exactly_the_blocks_it_needs_and_in_none_smaller(1, 3, False)


def forget_generated_tokens(patch: pytest.MonkeyPatch) -> None:
    real = Rows.known_tokens
    patch.setattr(Rows, "known_tokens", lambda self, slot: real(self, slot)[: self.num_prompt[slot]])


def free_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Residency.end

    def end(self, sequence, *, trusted=True):
        in_flight, self.in_flight = self.in_flight, type(self.in_flight)()
        real(self, sequence, trusted=trusted)
        self.in_flight = in_flight

    patch.setattr(Residency, "end", end)


def find_blocks_before_they_are_acknowledged(patch: pytest.MonkeyPatch) -> None:
    real = Planner._advance

    def advance(self, decoding, chunks):
        real(self, decoding, chunks)
        for chunk in chunks:
            if chunk.sequence.slot >= 0:
                rows, slot = self._residency.rows, chunk.slot
                computed, rows.computed[slot] = int(rows.computed[slot]), rows.scheduled[slot]
                self._residency.acknowledge(chunk.sequence)
                rows.computed[slot] = computed

    patch.setattr(Planner, "_advance", advance)


def write_what_was_found(patch: pytest.MonkeyPatch) -> None:
    real = planning.introduce
    patch.setattr(
        planning, "introduce", lambda s, tokens, blocks, computed, cached: real(s, tokens, blocks, computed, 0)
    )


def mix_up_salts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(residency, "root_digest", lambda version, salt: root_digest(version, ""))


def match_any_block(patch: pytest.MonkeyPatch) -> None:
    """A digest that forgets the tokens before its block."""

    def chain(self, sequence, tokens, num_blocks):
        size = self.config.block_size
        while len(sequence.chain) < num_blocks:
            first = len(sequence.chain) * size
            sequence.chain.append(tokens[first : first + size].tobytes())
        return sequence.chain

    patch.setattr(Residency, "chain", chain)


def trust_a_nan(patch: pytest.MonkeyPatch) -> None:
    real = Residency.end
    patch.setattr(Residency, "end", lambda self, sequence, *, trusted=True: real(self, sequence))


def preempt_the_oldest(patch: pytest.MonkeyPatch) -> None:
    real = Rows.victims
    patch.setattr(Rows, "victims", lambda self: real(self)[::-1])


def evict_the_newest(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release

    def release(self, blocks):
        before = set(self.idle)
        real(self, blocks)
        for block in [block for block in self.idle if block not in before]:
            self.idle.move_to_end(block, last=False)

    patch.setattr(BlockPool, "release", release)


def forget_to_count_a_reference(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.adopt

    def adopt(self, blocks):
        real(self, blocks)
        self.references[blocks[:1]] -= self.references[blocks[:1]] > 1

    patch.setattr(BlockPool, "adopt", adopt)


def believe_results_of_ended_rows(patch: pytest.MonkeyPatch) -> None:
    real = committing.Committer.commit

    def commit(self, step, result):
        step.serials = self._residency.rows.serial[step.slots]
        return real(self, step, result)

    patch.setattr(committing.Committer, "commit", commit)


def see_no_stops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StopTable, "candidates", lambda self, token_ids: np.zeros(len(token_ids), bool))


def stop_before_min_tokens(patch: pytest.MonkeyPatch) -> None:
    """The sampler masks stops until min_tokens; a core that counts otherwise ends resumed lists too early."""
    real = scheduler.first_stop
    patch.setattr(scheduler, "first_stop", lambda output, stops, min_tokens: real(output, stops, 0))


def miscount_what_fits(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        real = Scheduler._refuse

        def refuse(self, request):
            object.__setattr__(request, "max_tokens", request.max_tokens + by)
            try:
                real(self, request)
            finally:
                object.__setattr__(request, "max_tokens", request.max_tokens - by)

        patch.setattr(Scheduler, "_refuse", refuse)

    return change


def leave_one_token_rows_unheld(patch: pytest.MonkeyPatch) -> None:
    """A prompt with one token left, not scheduled for want of budget, computes by itself if it is not held."""
    real = Planner.plan

    def plan(self, epoch, now):
        batch = real(self, epoch, now)
        if batch is not None and len(batch.held):
            object.__setattr__(batch, "held", batch.held[:0])
        return batch

    patch.setattr(Planner, "plan", plan)


def end_twice(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def end(self, sequence, reason, num_output, stop_token_id):
        real(self, sequence, reason, num_output, stop_token_id)
        if num_output == 3:
            self._finished.append(self._finished[-1])

    patch.setattr(Scheduler, "_end", end)


def share_scores_cache(patch: pytest.MonkeyPatch) -> None:
    """Requests for prompt scores adopt cached blocks and so skip scores."""
    real = PrefixIndex.match
    patch.setattr(PrefixIndex, "match", lambda self, chain, limit: real(self, chain, len(chain)))


def give_new_prompts_everything(patch: pytest.MonkeyPatch) -> None:
    """The oldest prompt takes the whole budget; short ones behind a long one starve."""
    patch.setattr(planning, "first_share", lambda budget, contended: budget)


def prompts_before_decodes(patch: pytest.MonkeyPatch) -> None:
    real = Planner._compose

    def compose(self, draft: Draft, epoch: int):
        rows = self._residency.rows
        if draft.counts and len(rows.decoding()) > 4:
            for slot in rows.decoding()[::2].tolist():
                rows.sequences[slot].phase, rows.phase[slot] = Phase.PREFILL, 1
                rows.prefilling.append(rows.sequences[slot])
            rows._decoding = None
        return real(self, draft, epoch)

    patch.setattr(Planner, "_compose", compose)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (forget_generated_tokens, unchecked_preemptions),
    (forget_generated_tokens, random_histories),
    (free_blocks_at_once, random_histories),
    (find_blocks_before_they_are_acknowledged, random_histories),
    (write_what_was_found, random_histories),
    (mix_up_salts, groups.test_salts_weights_and_the_switch_keep_prefixes_apart),
    (match_any_block, random_histories),
    (trust_a_nan, lambda: basics.test_a_nan_ends_its_row_alone_and_its_blocks_are_not_found_again(1)),
    (preempt_the_oldest, pressure.test_the_youngest_of_the_lowest_priority_is_preempted),
    (evict_the_newest, groups.test_blocks_are_evicted_last_used_first_and_ends_of_prefixes_before_their_beginnings),
    (forget_to_count_a_reference, random_histories),
    (believe_results_of_ended_rows, random_histories),
    (see_no_stops, lambda: basics.test_stop_ids_end_a_choice_after_min_tokens(1)),
    (see_no_stops, random_histories),
    (stop_before_min_tokens, basics.test_a_resumed_stop_before_min_tokens_is_no_stop),
    (miscount_what_fits(1), exact_pools),
    (miscount_what_fits(-1), exact_pools),
    (leave_one_token_rows_unheld, random_histories),
    (end_twice, random_histories),
    (share_scores_cache, lambda: groups.test_prompt_scores_do_not_depend_on_cache_or_chunks(1, 33)),
    (give_new_prompts_everything, pressure.test_a_huge_prompt_neither_stops_running_streams_nor_starves),
    (prompts_before_decodes, pressure.test_a_huge_prompt_neither_stops_running_streams_nor_starves),
]


@pytest.mark.parametrize("check", sorted({check for _m, check in MUTANTS}, key=str), ids=lambda check: check.__name__)
def test_the_core_as_it_is_passes(check):
    check()


@pytest.mark.parametrize(("mutate", "check"), MUTANTS, ids=lambda part: part.__name__)
def test_a_broken_core_is_caught(mutate, check, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, Contradiction, NeverFits, pytest.fail.Exception)):
        check()
