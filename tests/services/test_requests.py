"""The life of requests: ids, cancels, deadlines, bounds, slow readers; every request ends in exactly one status."""

import asyncio
import random
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import generation_pb2 as pb
from scheduler_svc import front_end, limits, readers
from tests.services.pseudo import Pseudo, V, greedy
from tests.services.served import Served, finish, request, text, tokens, usage, wait_until

LONG = dict(max_tokens=55, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("tokenizer"), Pseudo(step_s=0.005)) as served:
        yield served


def start(served, message=None, timeout=20, **fields):
    return served.stub.Generate(message if message is not None else request(**fields), timeout=timeout)


def ending(call):
    """All events and the status that came after them."""
    events = []
    try:
        for event in call:
            events.append(event)
    except grpc.RpcError as error:
        return events, error.code().name, error.details()
    return events, "OK", ""


def wait_running(served, count=1):
    wait_until(lambda: served.stats().values["requests_running"] >= count)


# Ids


def test_a_live_id_is_refused_and_free_again_at_once(served):
    expected = greedy([1, 2, 3], 55)
    first = start(served, request_id="x", **LONG)
    next(first)
    assert served.refused(request_id="x", **LONG).code().name == "ALREADY_EXISTS"
    assert tokens(list(first)) == expected[1:]
    for _ in range(5):
        assert tokens(served.generate(request_id="x", max_tokens=2, temperature=0)) == expected[:2]


def test_cancelling_one_of_two_leaves_the_other(served):
    one, two = start(served, request_id="a", **LONG), start(served, request_id="b", **LONG)
    next(one), next(two)
    one.cancel()
    assert tokens(list(two)) == greedy([1, 2, 3], 55)[1:]
    served.wait_idle()
    assert tokens(served.generate(request_id="a", max_tokens=3, temperature=0)) == greedy([1, 2, 3], 3)


# Cancels


def test_cancel_at_any_point_frees_everything_and_spares_the_neighbour(served):
    served.wait_idle()
    rng = random.Random(5)
    prompt = list(range(20)) + [7] * 20
    neighbour = start(served, prompt=prompt, max_tokens=24, ignore_eos=True, temperature=0)
    for at in range(40):
        call = start(served, prompt=[*prompt[:-1], at % V], max_tokens=20, ignore_eos=True)
        for _ in range(rng.choice([0, 0, 1, 3, 19])):
            next(call, None)
        time.sleep(rng.choice([0, 0.002, 0.006]))
        call.cancel()
    assert tokens(list(neighbour)) == greedy(prompt, 24)
    served.wait_idle()


def test_cancel_after_the_last_chunk_was_sent_commits_nothing(tmp_path):
    model = Pseudo()
    with Served(tmp_path, model, max_batch_tokens=16, block_size=16) as served:
        model.hold()
        call = start(served, prompt=[5] * 40, max_tokens=10)
        model.allow(2)
        wait_until(lambda: model.num_steps == 2)
        wait_until(lambda: served.stats().values["steps_in_flight"] == 2)  # the third chunk and its token
        call.cancel()
        time.sleep(0.1)
        model.go()
        served.wait_idle()
        assert served.stats().values["generation_tokens_total"] == 0
        again = served.generate(prompt=[5] * 40, max_tokens=5, temperature=0, ignore_eos=True)
        assert tokens(again) == greedy([5] * 40, 5)


def test_cancel_in_the_queue(tmp_path):
    with Served(tmp_path, Pseudo(step_s=0.005), max_num_seqs=1) as served:
        running, waiting = start(served, **LONG), start(served, **LONG)
        wait_until(lambda: served.stats().values["requests_waiting"] == 1)
        waiting.cancel()
        wait_until(lambda: served.stats().values["requests_waiting"] == 0)
        assert len(tokens(list(running))) == 55


def test_a_client_that_dies_leaves_nothing(served):
    channel = grpc.insecure_channel(served.address)
    calls = [
        channel.unary_stream(
            "/lockstep.v1.Generation/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateEvent.FromString,
        )(request(**LONG))
        for _ in range(4)
    ]
    next(calls[0])
    channel.close()
    served.wait_idle()


def test_abort_tells_the_reader_and_names_what_was_live(served):
    call = start(served, request_id="victim", stop=["never"], **LONG)
    next(call)
    assert list(served.stub.Abort(pb.AbortRequest(request_ids=["victim", "nobody"])).aborted) == ["victim"]
    events, code, message = ending(call)
    assert code == "CANCELLED" and message == "the request was aborted"
    assert finish(events).reason == pb.FINISH_REASON_ABORT and events[-1].HasField("usage")
    served.wait_idle()


def test_one_id_said_a_million_times_is_aborted_once(served, monkeypatch):
    bystander, victim = start(served, request_id="bystander", **LONG), start(served, request_id="often", **LONG)
    next(bystander), next(victim)
    aborted = served.stub.Abort(pb.AbortRequest(request_ids=["often"] * 1_000_000 + ["nobody"]), timeout=20).aborted
    assert list(aborted) == ["often"]
    assert ending(victim)[1] == "CANCELLED" and ending(bystander)[1] == "OK"
    served.wait_idle()


def test_streams_without_requests_do_not_slow_others_down():
    async def intervals() -> list[float]:
        found = []
        for reader in (readers.ManyReader, readers.OneReader):
            pace = readers.Pace()
            for _ in range(1000):
                pace.add(reader())
            found.append(pace.interval_s())
        return found

    idle, busy = asyncio.run(intervals())
    assert idle == 0.0 and busy > 0.0


# Deadlines


def test_timeout_ends_a_running_request_with_what_it_has(served):
    begun = time.monotonic()
    events, code, _ = ending(start(served, timeout_ms=100, max_tokens=60, ignore_eos=True, temperature=0))
    assert code == "DEADLINE_EXCEEDED" and 0.08 < time.monotonic() - begun < 1.0
    assert finish(events).reason == pb.FINISH_REASON_ABORT
    assert 0 < len(tokens(events)) == usage(events).completion_tokens < 60
    assert tokens(events) == greedy([1, 2, 3], len(tokens(events)))
    served.wait_idle()


def test_timeout_ends_a_waiting_request(tmp_path):
    model = Pseudo()
    with Served(tmp_path, model, max_num_seqs=1) as served:
        model.hold()
        blocker = start(served, **LONG)
        events, code, _ = ending(start(served, timeout_ms=50, max_tokens=5))
        assert code == "DEADLINE_EXCEEDED" and not tokens(events)
        model.go()
        assert len(tokens(list(blocker))) == 55


def test_the_calls_own_deadline_ends_the_work(served):
    _, code, _ = ending(start(served, timeout=0.1, **LONG))
    assert code == "DEADLINE_EXCEEDED"
    served.wait_idle(2)


# Bounds


def test_overload_is_answered_at_once_with_a_hint_and_n_counts_as_n(tmp_path):
    model = Pseudo()
    with Served(tmp_path, model, max_num_seqs=2, max_queue=8) as served:
        model.hold()
        blockers = [start(served, n=2, **LONG) for _ in range(5)]  # two run, eight wait
        wait_until(lambda: served.stats().values["requests_live"] == 5)
        begun = time.monotonic()
        for n in (1, 2):
            error = served.refused(n=n, **LONG)
            assert error.code().name == "RESOURCE_EXHAUSTED" and "the queue holds 8" in error.details()
            hint = error_details_pb2.RetryInfo()
            assert rpc_status.from_call(error).details[0].Unpack(hint) and hint.retry_delay.ToNanoseconds() > 0
        assert time.monotonic() - begun < 1.0
        assert served.refused(n=64, **LONG).code().name == "INVALID_ARGUMENT"  # never fits, however long it waits
        model.go()
        assert all(len(tokens(events)) == len(tokens(events, 1)) == 55 for events in map(list, blockers))
        served.wait_idle()


def test_a_flood_ends_every_request_exactly_once(tmp_path):
    """Many more than fit, at once: each is answered or refused, none hangs, nothing is left."""
    model = Pseudo()
    with Served(tmp_path, model, max_num_seqs=8, max_queue=100) as served:
        model.hold()
        calls = [start(served, max_tokens=3, ignore_eos=True, timeout=60) for _ in range(1000)]
        refused = 'requests_refused_total{code="RESOURCE_EXHAUSTED"}'
        wait_until(lambda: served.stats().values[refused] == 1000 - 108)
        model.go()
        codes = [ending(call) for call in calls]
        assert {code for _, code, _ in codes} == {"OK", "RESOURCE_EXHAUSTED"}
        assert all(len(tokens(events)) == (3 if code == "OK" else 0) for events, code, _ in codes)
        assert sum(code == "OK" for _, code, _ in codes) == 108
        served.wait_idle()


def test_messages_above_the_bound_are_refused_with_the_bound(served):
    control = tokens(served.generate(temperature=0, max_tokens=5))
    error = served.refused(request([1] * 5_000_000, max_tokens=1))  # 5 MB: a message we take, a prompt we do not
    assert error.code().name == "INVALID_ARGUMENT" and "5000000 tokens, the context is 64" in error.details()
    error = served.refused(request([1] * (limits.MAX_REQUEST_BYTES + 1000), max_tokens=1))
    assert error.code().name == "RESOURCE_EXHAUSTED" and str(limits.MAX_REQUEST_BYTES) in error.details()
    begun = time.monotonic()
    error = served.refused(text="x" * 8_000_000, max_tokens=1)
    assert error.code().name == "INVALID_ARGUMENT" and "8000000 characters" in error.details()
    assert time.monotonic() - begun < 2  # nobody tokenized it
    assert tokens(served.generate(temperature=0, max_tokens=5)) == control


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (dict(stop=[""] * 64), "INVALID_ARGUMENT"),
        (dict(expected_fingerprint="é" * 1_000_000), "FAILED_PRECONDITION"),
        (dict(request_id="x" * 1_000_000), "INVALID_ARGUMENT"),
        (dict(chat=[("é" * 100_000, "hi")]), "INVALID_ARGUMENT"),
    ],
    ids=["many violations", "fingerprint", "id", "role"],
)
def test_long_errors_still_arrive(served, fields, code):
    """A status travels as metadata; one that is too long would reach the client as something else."""
    error = served.refused(max_tokens=1, **fields)
    assert error.code().name == code and 0 < len(error.details()) <= 1000


def test_large_answers_stay_below_what_a_default_client_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_EVENT_BYTES", 2000)
    with Served(tmp_path, max_seq_len=512) as served:
        prompt = [at % V for at in range(400)]
        events = served.generate(
            prompt=prompt, prompt_logprobs=20, max_tokens=30, logprobs=20, return_logits=True, ignore_eos=True
        )
        assert max(event.ByteSize() for event in events) < 2 * 2000 + 4 * V + 1000
        assert sum(len(event.prompt_logprobs) for event in events) == 400
        assert len(tokens(events)) == sum(len(event.alternatives) for event in events) == 30
        first = next(at for at, event in enumerate(events) if event.token_ids)
        assert all(event.prompt_logprobs for event in events[: first + 1])


# Slow readers


def test_a_slow_reader_gets_every_token_several_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(readers.Pace, "interval_s", lambda self: 0.05)
    with Served(tmp_path, Pseudo(step_s=0.002)) as served:
        events = served.generate(**LONG)
        assert tokens(events) == greedy([1, 2, 3], 55) and len(events) < 20
        assert text(events) == served.server._front.model.tokenizer.decode(tokens(events))


def test_a_stalled_reader_is_bounded_then_cancelled_and_its_blocks_are_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 100_000)
    monkeypatch.setattr(limits, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(readers.Pace.break_off_stalled, "__defaults__", (1.0,))
    with Served(tmp_path, Pseudo(max_position_embeddings=8192), max_seq_len=8192, num_blocks=1024) as served:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(served.address, options) as channel:
            call = channel.unary_stream(
                "/lockstep.v1.Generation/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateEvent.FromString,
            )(request(max_tokens=8000, ignore_eos=True, logprobs=20, return_logits=True))
            next(call)
            other = tokens(served.generate(temperature=0, max_tokens=20, ignore_eos=True, timeout=60))
            assert other == greedy([1, 2, 3], 20)
            wait_until(lambda: served.stats().values["requests_running"] == 0, 60)
            served.wait_idle()
            _, code, message = ending(call)
            assert code == "RESOURCE_EXHAUSTED", (code, message)


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (
            lambda m: m.setattr(front_end.FrontEnd, "cancel", lambda self, stream: None),
            test_a_client_that_dies_leaves_nothing,
        ),
        (
            lambda m: m.setattr(front_end.FrontEnd, "abort", lambda self, request_ids: []),
            test_abort_tells_the_reader_and_names_what_was_live,
        ),
    ],
    ids=["disconnects ignored", "aborts ignored"],
)
def test_broken_front_ends_do_not_pass(tmp_path, mutate, test, monkeypatch):
    with Served(tmp_path, Pseudo(step_s=0.2), dict(drain_timeout_s=0.1)) as served:
        mutate(monkeypatch)
        monkeypatch.setattr(Served, "wait_idle", lambda self, timeout_s=1.0: wait_until(
            lambda: not self.stats().values["requests_running"] and not self.stats().values["requests_live"], 1.0
        ))  # fmt: skip
        with pytest.raises(Exception):  # noqa: B017
            test(served)


def test_threads_do_not_grow_with_requests(served):
    served.generate(max_tokens=1)
    before = threading.active_count()
    for _ in range(20):
        served.generate(max_tokens=1)
    assert threading.active_count() <= before + 1
