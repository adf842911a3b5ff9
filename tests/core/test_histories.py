"""Random histories: whatever happens in whatever order, every choice is told what it gets alone, once, to its end."""

import os

import numpy as np
import pytest

from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.request import Overloaded
from tests.core.engine import Bench
from tests.core.fake import logprob, solo


def random_bench(rng: np.random.Generator, **options) -> Bench:
    at_scheduler = rng.random() < 0.25
    block_size = int(rng.choice([1, 2, 3, 4, 8]))
    num_blocks = int(rng.integers(48 // block_size, 160 // block_size))
    return Bench(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=int(rng.integers(1, 9)),
        max_batch_tokens=int(rng.integers(1, 30)),
        max_seq_len=1000,
        max_queue=16,
        sample_at_scheduler=at_scheduler,
        pipeline_depth=1 if at_scheduler else int(rng.integers(1, 4)),
        prefix_cache=bool(rng.random() < 0.8),
        ageing_s=float(rng.choice([0, 5, 50])),
        fair_tenants=bool(rng.random() < 0.3),
        forecast=bool(rng.random() < 0.6),
        watermark=float(rng.choice([0, 0.1])),
        order=str(rng.choice(["arrival", "makespan"])),
        poisoned=lambda name, index: hash_of(name) % 19 == 0 and index >= 2,
        **options,
    )


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name.split("/")[0]))


def random_request(bench: Bench, rng: np.random.Generator):
    """Prompts are prefixes of a few families, so that blocks are shared; all fit the pool."""
    room = bench.config.num_blocks * bench.config.block_size
    family = np.random.default_rng(int(rng.integers(3))).integers(0, 97, 200)
    length = int(rng.integers(1, min(40, room)))
    prompt = np.concatenate((family[:length], rng.integers(0, 97, int(rng.integers(0, 3))))).astype(np.int32)[
        : room - 1
    ]
    max_tokens = int(rng.integers(0, min(24, room - len(prompt) + 1) + 1))
    options = {}
    if max_tokens == 0 or rng.random() < 0.15:
        options["prompt_logprobs"] = int(rng.integers(0, 3))
    if rng.random() < 0.4:
        options["eos_ids"] = frozenset(rng.integers(0, 97, 8).tolist())
        options["min_tokens"] = int(rng.integers(0, max_tokens + 1))
    if rng.random() < 0.3:
        options["n"] = int(rng.integers(2, 5))
    if rng.random() < 0.2:
        options["logprobs"] = int(rng.integers(0, 4))
    if rng.random() < 0.1:
        options["return_logits"] = True
    if rng.random() < 0.15:
        options["deadline"] = bench.now + float(rng.integers(1, 60))
    request = bench.request(
        prompt,
        max_tokens,
        priority=int(rng.integers(-1, 2)),
        tenant=str(rng.integers(3)),
        cache_salt=str(rng.integers(2)),
        **options,
    )
    if rng.random() < 0.2 and max_tokens:
        outputs = [solo(request, choice)[0] for choice in range(request.n)]
        cut = [np.array(o[: int(rng.integers(0, len(o) + 1))], np.int32) for o in outputs]
        request = bench.request(
            prompt, max_tokens, **options, seed=request.seed, resume=tuple(cut), request_id=request.request_id
        )
    return request


def one_event(bench: Bench, rng: np.random.Generator) -> None:
    dice = rng.random()
    live = [key for key, choice in bench.told if not bench.told[key, choice].finished]
    if dice < 0.2:
        try:
            bench.submit(random_request(bench, rng))
        except Overloaded:
            pass
    elif dice < 0.25 and live:
        key = int(rng.choice(live))
        bench.cancel(key, int(rng.integers(bench.requests[key].n)) if rng.random() < 0.3 else None)
    elif dice < 0.28 and live:
        key = int(rng.choice(live))
        choice = int(rng.integers(bench.requests[key].n))
        bench.stopped.add((key, choice))
        bench.core.stop(key, choice, len(bench.output(key, choice)), bench.now)
        bench.verify()
        bench.take(bench.core.take_events())
    elif dice < 0.285:
        bench.lose_workers()
    elif dice < 0.65:
        if bench.core.can_plan:
            bench.plan()
    elif bench.waiting:
        bench.commit()
    bench.take(bench.core.take_events())


def check_story(bench: Bench) -> None:
    """What each choice was told agrees with what it gets alone, as far as it got."""
    for (key, choice), told in bench.told.items():
        request = bench.requests[key]
        (finished,) = told.finished
        expected, reason = solo(request, choice)
        output = bench.output(key, choice)
        name = request.request_id if request.n == 1 else f"{request.request_id}/{choice}"
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH) and (key, choice) not in bench.stopped:
            assert finished.reason.value == reason
            assert output == expected, f"request {key} choice {choice}"
        assert output == expected[: len(output)], f"request {key} choice {choice}"
        if finished.reason is FinishReason.NAN:
            assert hash_of(name) % 19 == 0
        if request.prompt_logprobs is not None and choice == 0:
            check_scores(bench, key, complete=reason == finished.reason.value and (key, 0) not in bench.stopped)
        if request.sampling.logprobs is not None and not bench.config.sample_at_scheduler:
            assert len(told.logprobs) == len(told.tokens)


def check_scores(bench: Bench, key: int, complete: bool) -> None:
    request, told = bench.requests[key], bench.told[key, 0]
    expected, h, context = [], 0, 0
    for position, token in enumerate(request.prompt.tolist()[:-1]):
        h = (h * 6364136223846793005 + token + position) % 2**64
        context = (context + h) % 2**64
        expected.append(logprob(context, int(request.prompt[position + 1])))
    assert told.scores == expected[: len(told.scores)]
    if complete and (len(request.resume) == 0 or told.tokens):
        assert told.scores == expected


@pytest.mark.parametrize("seed", range(int(os.environ.get("HISTORIES", "60"))))
def test_random_history_is_told_right(seed):
    rng = np.random.default_rng(seed)
    bench = random_bench(rng)
    for _ in range(200):
        one_event(bench, rng)
    bench.run()
    check_story(bench)
