"""The core's promises on small numbers, against what each request gets alone."""

import numpy as np
import pytest

from protos.step import StepResult
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.request import Draining, Duplicate, NeverFits, Overloaded
from tests.core.engine import Bench
from tests.core.fake import solo

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@DEPTHS
def test_batched_requests_get_what_they_get_alone(depth):
    bench = Bench(pipeline_depth=depth)
    for prompt in (1, 3, 4, 5, 17, 40):
        bench.submit(prompt, max_tokens=11)
    bench.run()
    bench.assert_solo()


@DEPTHS
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("blocks", [20, 24, 31, 40])
def test_preemption_changes_nothing(depth, cache, forecast, blocks):
    bench = Bench(num_blocks=blocks, pipeline_depth=depth, prefix_cache=cache, forecast=forecast)
    for _ in range(8):
        bench.submit(20, max_tokens=60)
    bench.run()
    bench.assert_solo()
    if not forecast:
        assert bench.core.stats().counters.preemptions >= 4


@DEPTHS
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("cached_before", [False, True])
def test_a_request_runs_in_a_pool_of_exactly_the_blocks_it_needs_and_in_none_smaller(depth, block_size, cached_before):
    """The last token is never fed back, so N - 1 tokens need keys and values."""
    for num_prompt in range(1, 10):
        for max_tokens in range(0, 8):
            needed = -(-(num_prompt + max(max_tokens, 1) - 1 if max_tokens else num_prompt - 1) // block_size)
            options = {"prompt_logprobs": 0} if max_tokens == 0 else {}
            bench = Bench(num_blocks=max(needed, 1), block_size=block_size, pipeline_depth=depth, max_batch_tokens=4)
            if cached_before:
                bench.submit(1, max_tokens=1)
                bench.run()
            for _ in range(2):
                bench.submit(num_prompt, max_tokens=max_tokens, **options)
            bench.run()
            bench.assert_solo()
            if needed > 1:
                with pytest.raises(NeverFits, match=f"need {needed} KV blocks .* there are {needed - 1}"):
                    Bench(num_blocks=needed - 1, block_size=block_size).submit(num_prompt, max_tokens, **options)


def test_sampling_at_the_scheduler_gives_the_same_tokens():
    bench = Bench(num_blocks=20, sample_at_scheduler=True)
    for _ in range(8):
        bench.submit(9, max_tokens=30, eos_ids=frozenset({5}), logprobs=2, return_logits=True)
    bench.run()
    bench.assert_solo()
    for told in bench.told.values():
        assert told.logits == len(told.tokens)


@DEPTHS
def test_stop_ids_end_a_choice_after_min_tokens(depth):
    bench = Bench(pipeline_depth=depth)
    for n in range(30):
        bench.submit(5, max_tokens=40, eos_ids=frozenset(range(20)), min_tokens=n, stop_token_ids=frozenset({50, 51}))
    bench.run()
    bench.assert_solo()
    assert all(told.finished[0].completion_tokens >= n for n, told in enumerate(bench.told.values()))


def test_a_stop_on_the_last_token_is_a_stop():
    bench = Bench()
    key = bench.submit(5, max_tokens=6)
    bench.run()
    last = bench.output(key)[-1]
    request = bench.request(bench.requests[key].prompt, 6, seed=key, eos_ids=frozenset({last}))
    if last not in bench.output(key)[:-1]:
        again = bench.submit(request)
        bench.run()
        (finished,) = bench.told[again, 0].finished
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, last)


def test_huge_stop_lists_cost_nothing_a_token():
    bench = Bench()
    bench.submit(5, max_tokens=20, stop_token_ids=frozenset(range(100, 50_000)), stop_ids=np.array([], np.int32))
    bench.submit(5, max_tokens=20)
    bench.run()
    bench.assert_solo()


# Refusals and bounds


def test_refusals_name_both_numbers_and_leave_nothing():
    bench = Bench(num_blocks=4, block_size=4, max_seq_len=64, max_queue=2, max_num_seqs=1)
    with pytest.raises(NeverFits, match=r"need 5 KV blocks.*there are 4"):
        bench.submit(10, max_tokens=8)
    with pytest.raises(NeverFits, match="65 tokens; the context holds 64"):
        bench.submit(60, max_tokens=5)
    with pytest.raises(NeverFits, match="n is 4; at most 3") as refusal:
        bench.submit(1, n=4)
    assert refusal.value.field == "n"
    bench.submit(10, max_tokens=7, request_id="x")
    with pytest.raises(Duplicate):
        bench.submit(1, request_id="x")
    bench.submit(1)
    bench.submit(1)
    with pytest.raises(Overloaded) as overload:
        bench.submit(1)
    assert 0 < overload.value.retry_after_s <= 60
    bench.core.drain()
    with pytest.raises(Draining):
        bench.submit(1)
    bench.run()
    bench.assert_solo()
    assert bench.core.stats().counters.refused == 6


def test_an_id_may_be_used_again_once_its_request_has_ended():
    bench = Bench()
    for _ in range(3):
        bench.submit(3, request_id="x")
        bench.run()
    bench.assert_solo()


def test_the_queue_is_bounded_in_choices_and_in_tokens():
    bench = Bench(num_blocks=10_000, max_num_seqs=2, max_queue=6, max_queued_tokens=50, max_seq_len=20_000)
    bench.submit(4, n=8)
    with pytest.raises(Overloaded, match="8 choices wait and 1 more"):
        bench.submit(4)
    bench.run()
    bench.submit(4)
    with pytest.raises(Overloaded, match="4 tokens wait and 60 more would; the queue holds 50"):
        bench.submit(60)
    bench.run()
    accepted = refused = 0
    for _ in range(10_000):
        try:
            bench.submit(1000 if accepted % 2 else 1, max_tokens=2)
            accepted += 1
        except Overloaded:
            refused += 1
    assert accepted <= 8 and refused == 10_000 - accepted
    bench.run()
    bench.assert_solo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"sample_at_scheduler": True, "pipeline_depth": 2}, "so pipeline_depth is 1"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CoreConfig(**{"num_blocks": 1, **options})


# Ends


@DEPTHS
@pytest.mark.parametrize("after", range(0, 14))
def test_a_cancelled_request_is_gone_within_two_steps_and_its_neighbour_does_not_notice(depth, after):
    bench = Bench(max_batch_tokens=16, max_num_seqs=2, pipeline_depth=depth)
    shared = list(range(20))
    keys = [bench.submit([*shared, *range(40, 40 + n)], max_tokens=8, seed=n) for n in (20, 5, 3)]
    for _ in range(after):
        bench.step()
    got = list(bench.told[keys[0], 0].tokens)
    bench.cancel(keys[0])
    bench.cancel(keys[0])  # nobody is cancelled twice
    held = bench.core._residency.held_blocks()
    for _ in range(max(2, depth)):
        bench.step()
    assert not any(old is new for old in held for new in bench.core._residency.held_blocks())
    bench.run()
    assert bench.told[keys[0], 0].tokens == got, "no token after the cancel"
    assert len(bench.told[keys[0], 0].finished) == 1
    bench.assert_solo(*keys[1:])


def test_one_choice_may_be_cancelled_alone():
    bench = Bench()
    key = bench.submit(9, max_tokens=6, n=3)
    bench.step()
    bench.cancel(key, choice=1)
    bench.run()
    assert [bench.reason(key, choice) for choice in range(3)] == ["length", "cancelled", "length"]


@DEPTHS
def test_a_cancel_between_the_last_chunk_and_its_result_commits_no_token(depth):
    bench = Bench(max_batch_tokens=16, pipeline_depth=depth)
    key = bench.submit(40, max_tokens=5)
    while not any(step.samples is None or step.samples.any() for step in bench.core._residency.in_flight):
        if bench.core.can_plan:
            bench.plan()
        else:
            bench.commit()
    bench.cancel(key)
    assert bench.core.stats().blocks_held > 0, "the step may still write to them"
    bench.run()
    assert bench.told[key, 0].tokens == [] and bench.reason(key) == "cancelled"
    assert bench.core.stats().counters.discarded_tokens >= 1


@DEPTHS
def test_a_stop_string_ends_a_choice_at_the_front_ends_word(depth):
    bench = Bench(pipeline_depth=depth)
    key, other = bench.submit(5, max_tokens=50), bench.submit(5, max_tokens=9)
    while len(bench.told[key, 0].tokens) < 7:
        bench.step()
    bench.core.stop(key, 0, 6, bench.now)
    bench.core.stop(key, 0, 6, bench.now)
    bench.run()
    (finished,) = bench.told[key, 0].finished
    assert (finished.reason, finished.completion_tokens) == (FinishReason.STOP, 6)
    bench.assert_solo(other)


@DEPTHS
def test_a_deadline_frees_everything(depth):
    bench = Bench(pipeline_depth=depth, max_num_seqs=1)
    late = [bench.submit(9, max_tokens=40, deadline=8.0) for _ in range(2)]  # one runs, one waits
    other = bench.submit(9, max_tokens=20)
    assert bench.core.next_deadline == 8.0
    bench.run()
    assert [bench.reason(key) for key in late] == ["timeout", "timeout"]
    assert bench.core.next_deadline is None
    bench.assert_solo(other)


@DEPTHS
def test_a_nan_ends_its_row_alone_and_its_blocks_are_not_found_again(depth):
    bench = Bench(pipeline_depth=depth, poisoned=lambda name, index: name == "bad" and index == 3)
    prompt = list(range(12))
    bad = bench.submit(prompt, max_tokens=9, request_id="bad")
    good = bench.submit(11, max_tokens=9)
    bench.run()
    assert bench.reason(bad) == "nan" and len(bench.told[bad, 0].tokens) == 3
    again = bench.submit(prompt, max_tokens=9)
    bench.run()
    assert bench.told[again, 0].finished[0].cached_tokens == 0
    bench.assert_solo(good, again)


def test_the_end_of_everything_tells_everyone():
    bench = Bench(max_num_seqs=1, pipeline_depth=2)
    keys = [bench.submit(5, max_tokens=9) for _ in range(3)]
    bench.step()
    bench.core.drain()
    bench.core.end_all(FinishReason.DRAINED, bench.now)
    bench.run()
    assert [bench.reason(key) for key in keys] == ["drained"] * 3


# Lost workers and resumed requests


@DEPTHS
@pytest.mark.parametrize("at", range(0, 24, 3))
def test_lost_workers_change_no_token(depth, at):
    bench = Bench(num_blocks=24, pipeline_depth=depth, max_batch_tokens=8)
    for n in (3, 12, 20):
        bench.submit(n, max_tokens=15, n=2, prompt_logprobs=0)
    for _ in range(at):
        bench.step()
    bench.lose_workers()
    bench.run()
    bench.assert_solo()


def test_a_result_of_a_lost_epoch_changes_nothing():
    bench = Bench()
    key = bench.submit(5)
    bench.plan()
    late = bench.waiting[0]
    bench.lose_workers()
    events = bench.core.commit(late, bench.now)
    assert not len(events.tokens.keys) and not events.finished
    bench.run()
    bench.assert_solo(key)
    assert bench.core.stats().counters.late_results == 1


@DEPTHS
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(depth):
    whole = Bench(pipeline_depth=depth)
    options = {"max_tokens": 12, "n": 2, "min_tokens": 4, "eos_ids": frozenset(range(8))}
    key = whole.submit(7, **options)
    whole.run()
    outputs = [whole.output(key, choice) for choice in range(2)]
    for cut in range(0, 13):
        bench = Bench(pipeline_depth=depth)
        resume = tuple(np.array(output[:cut], np.int32) for output in outputs)
        again = bench.submit(whole.requests[key].prompt, seed=whole.requests[key].seed, resume=resume, **options)
        bench.run()
        for choice in range(2):
            assert bench.output(again, choice) == outputs[choice]
            assert bench.reason(again, choice) == whole.reason(key, choice)
            assert bench.told[again, choice].finished[0].completion_tokens == len(outputs[choice])


def test_a_resumed_list_that_has_ended_gets_only_its_terminal_event():
    bench = Bench()
    stopped = np.array([1, 2, 9], np.int32)
    full = np.array([1, 2, 3, 4], np.int32)
    key = bench.submit(5, max_tokens=4, n=2, eos_ids=frozenset({9}), resume=(stopped, full))
    assert not bench.core.has_work and bench.plan() is None
    reasons = [(told.finished[0].reason.value, told.finished[0].completion_tokens) for told in bench.told.values()]
    assert reasons == [("stop", 3), ("length", 4)]
    assert bench.told[key, 0].finished[0].stop_token_id == 9


def test_a_resumed_stop_before_min_tokens_is_no_stop():
    bench = Bench()
    resume = (np.array([9, 1], np.int32),)
    key = bench.submit(5, max_tokens=6, min_tokens=2, eos_ids=frozenset({9}), resume=resume)
    bench.run()
    bench.assert_solo()
    assert len(bench.output(key)) > 2


def test_a_result_out_of_order_is_our_fault():
    bench = Bench(pipeline_depth=2)
    bench.submit(5)
    bench.plan()
    bench.plan()
    with pytest.raises(AssertionError, match="oldest step in flight"):
        bench.core.commit(bench.waiting[1], bench.now)
    with pytest.raises(AssertionError, match="0 tokens for 1"):
        bench.core.commit(StepResult(1, 1, 0), bench.now)


def test_solo_is_not_trivial():
    bench = Bench()
    outputs = {tuple(solo(bench.request([1, 2, 3], 8, seed=seed))[0]) for seed in range(20)}
    assert len(outputs) == 20
