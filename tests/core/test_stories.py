"""Stories of the core as text, in golden/: read them to see what it does, and what a change of policy changes.

`UPDATE_GOLDEN=1 pytest tests/core/test_stories.py` writes them anew.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.core.engine import Bench
from tests.core.fake import solo
from tests.core.story import Teller

GOLDEN = Path(__file__).parent / "golden"


def chunked_prefill() -> Teller:
    teller = Teller(
        Bench(max_batch_tokens=8), "A prompt of 20 tokens beside a running stream, 8 tokens a step, blocks of 4"
    )
    teller.bench.submit(3, max_tokens=6, request_id="stream")
    teller.go_on(2)
    teller.bench.submit(20, max_tokens=2, request_id="prompt")
    teller.go_on()
    return teller


def preemption() -> Teller:
    bench = Bench(num_blocks=7, forecast=False, prefix_cache=False)
    teller = Teller(bench, "Two rows outgrow a pool of 7 blocks of 4: the younger makes room and keeps its tokens")
    bench.submit(8, max_tokens=13, request_id="older")
    bench.submit(8, max_tokens=9, request_id="younger")
    teller.go_on()
    return teller


def preemption_in_a_pipeline() -> Teller:
    bench = Bench(num_blocks=7, forecast=False, prefix_cache=False, pipeline_depth=2)
    teller = Teller(
        bench, "The same two steps deep: the younger leaves one step ahead and returns when its steps are in"
    )
    bench.submit(8, max_tokens=13, request_id="older")
    bench.submit(8, max_tokens=9, request_id="younger")
    teller.go_on()
    return teller


def admission_by_forecast() -> Teller:
    bench = Bench(num_blocks=8, prefix_cache=False)
    teller = Teller(
        bench, "A request waits because the pool would run full before the first one ends, not because of now"
    )
    bench.submit(12, max_tokens=13, request_id="first")
    bench.submit(12, max_tokens=13, request_id="second")
    teller.go_on()
    return teller


def speculation() -> Teller:
    bench = Bench(num_blocks=8)
    teller = Teller(
        bench, "One starts in blocks that the other needs only later: it loses one block and keeps its tokens"
    )
    bench.submit(8, max_tokens=13, request_id="first")
    bench.submit(8, max_tokens=13, request_id="second")
    teller.go_on()
    return teller


def shared_prefix() -> Teller:
    bench = Bench()
    teller = Teller(bench, "Three choices of one prompt of 8 tokens: one computes it, the others only its last token")
    bench.submit(list(range(8)), max_tokens=3, n=3, request_id="group")
    teller.go_on()
    teller.say("the same prompt again, longer by one")
    bench.submit(list(range(9)), max_tokens=1, request_id="later")
    teller.go_on()
    return teller


def stop_in_a_pipeline() -> Teller:
    bench = Bench(pipeline_depth=2)
    teller = Teller(
        bench, "A stop is seen one step late: the row is computed once too often and that token thrown away"
    )
    request = bench.request(5, 20, request_id="stops")
    third = solo(request)[0][2]
    bench.submit(bench.request(request.prompt, 20, seed=request.seed, request_id="stops", eos_ids=frozenset({third})))
    bench.submit(5, max_tokens=6, request_id="other")
    teller.go_on()
    return teller


def cancel_mid_prefill() -> Teller:
    bench = Bench(max_batch_tokens=8)
    teller = Teller(bench, "Cancelled while a chunk is in flight: blocks come back when that step is done")
    bench.submit(20, max_tokens=4, request_id="gone")
    bench.submit(3, max_tokens=3, request_id="stays")
    teller.plan()
    teller.say("cancel gone")
    bench.cancel(1)
    teller.say(f"{bench.core.stats().blocks_held} blocks held")
    teller.commit()
    teller.say(f"{bench.core.stats().blocks_held} blocks held")
    teller.go_on()
    return teller


def worker_lost() -> Teller:
    bench = Bench(pipeline_depth=2)
    teller = Teller(
        bench, "The workers are lost with two steps in flight: everything is introduced again, nothing is told twice"
    )
    bench.submit(6, max_tokens=6, request_id="a")
    bench.submit(9, max_tokens=4, request_id="b", n=2)
    teller.go_on(3)
    teller.plan()
    teller.say("workers lost; a new epoch")
    bench.lose_workers()
    teller.go_on()
    return teller


def sampled_at_the_scheduler() -> Teller:
    bench = Bench(sample_at_scheduler=True)
    teller = Teller(bench, "Tokens drawn at the scheduler are fed with the next batch")
    bench.submit(3, max_tokens=3, request_id="a")
    bench.submit(6, max_tokens=2, request_id="b")
    teller.go_on()
    return teller


def prompt_scores() -> Teller:
    bench = Bench(max_batch_tokens=4)
    teller = Teller(
        bench, "Scores of a prompt in chunks; scoring alone computes all but the last token and draws nothing"
    )
    bench.submit(list(range(9)), max_tokens=1, request_id="first")
    teller.go_on()
    bench.submit(list(range(9)), max_tokens=0, prompt_logprobs=0, request_id="scores")
    teller.go_on()
    return teller


def resumed() -> Teller:
    bench = Bench()
    teller = Teller(bench, "A client brings 3 tokens of one choice and all 4 of another")
    resume = (np.array([5, 6, 7], np.int32), np.array([5, 6, 7, 8], np.int32))
    bench.submit(6, max_tokens=4, n=2, request_id="again", resume=resume)
    teller.say(", ".join(f"choice {f.finished[0].choice} has ended" for f in bench.told.values() if f.finished))
    teller.go_on()
    return teller


def deadline() -> Teller:
    bench = Bench(max_num_seqs=1, pipeline_depth=2)
    teller = Teller(
        bench, "Two deadlines pass, one of a running and one of a waiting request: the third starts at once"
    )
    bench.submit(5, max_tokens=20, request_id="runs", deadline=4.0)
    bench.submit(5, max_tokens=20, request_id="waits", deadline=4.0)
    bench.submit(5, max_tokens=2, request_id="third")
    teller.go_on()
    return teller


def priorities_age() -> Teller:
    bench = Bench(max_num_seqs=1, ageing_s=3)
    teller = Teller(bench, "One slot, a level of priority for 3 s of waiting: low goes before what came 4 s after it")
    bench.submit(3, max_tokens=3, priority=1, request_id="high0")
    bench.submit(3, max_tokens=1, priority=0, request_id="low")
    for number in range(1, 4):
        bench.submit(3, max_tokens=2, priority=1, request_id=f"high{number}")
        teller.go_on(2)
    teller.go_on()
    return teller


def fair_tenants() -> Teller:
    bench = Bench(max_num_seqs=1, fair_tenants=True)
    teller = Teller(bench, "Three requests of one tenant are there first: the other tenant's goes second")
    for number in range(3):
        bench.submit(4, max_tokens=2, tenant="many", request_id=f"many{number}")
    bench.submit(4, max_tokens=2, tenant="one", request_id="one")
    teller.go_on()
    return teller


def makespan() -> Teller:
    bench = Bench(max_num_seqs=2, order="makespan", ageing_s=10)
    teller = Teller(bench, "Two slots: the long one came last and would outlast all others, so it starts before them")
    for number in range(4):
        bench.submit(3, max_tokens=4, request_id=f"short{number}")
    bench.submit(3, max_tokens=12, request_id="long")
    teller.go_on()
    return teller


def watermark() -> Teller:
    bench = Bench(num_blocks=8, watermark=0.4, forecast=False)
    teller = Teller(bench, "Two of eight blocks would be left: the second waits until the first has ended")
    bench.submit(11, max_tokens=2, request_id="first")
    bench.submit(11, max_tokens=2, request_id="second")
    teller.go_on()
    return teller


def finished_prefix() -> Teller:
    bench = Bench(num_blocks=6)
    teller = Teller(bench, "Blocks of a finished request are found again, and evicted end first when others need them")
    bench.submit(list(range(12)), max_tokens=1, request_id="first")
    teller.go_on()
    bench.submit(list(range(13)), max_tokens=1, request_id="found")
    teller.go_on()
    bench.submit(list(range(50, 66)), max_tokens=1, request_id="stranger")
    teller.go_on()
    bench.submit(list(range(13)), max_tokens=1, request_id="cut short")
    teller.go_on()
    return teller


def leader_gone() -> Teller:
    bench = Bench(max_batch_tokens=8)
    teller = Teller(bench, "A follower waits for its leader's blocks; the leader is cancelled and the follower leads")
    bench.submit(list(range(20)), max_tokens=1, request_id="leader")
    bench.submit(list(range(20)), max_tokens=1, request_id="follower")
    teller.go_on(2)
    teller.say(f"waiting for {bench.core.stats().waiting_for}; cancel leader")
    bench.cancel(1)
    teller.go_on()
    return teller


STORIES: list[Callable[[], Teller]] = [
    chunked_prefill,
    preemption,
    preemption_in_a_pipeline,
    admission_by_forecast,
    speculation,
    shared_prefix,
    stop_in_a_pipeline,
    cancel_mid_prefill,
    worker_lost,
    sampled_at_the_scheduler,
    prompt_scores,
    resumed,
    deadline,
    priorities_age,
    fair_tenants,
    makespan,
    watermark,
    finished_prefix,
    leader_gone,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_story_is_as_told(story):
    teller = story()
    teller.bench.assert_idle()
    text, file = teller.text(), GOLDEN / f"{story.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_no_story_is_forgotten():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {story.__name__ for story in STORIES}
