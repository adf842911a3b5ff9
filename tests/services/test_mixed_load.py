"""The oracles of the simulated day over the real services: everything at once, and nothing is lost, doubled or changed.

A scheduler and a worker as processes, a tiny model with real weights, a pool that is too small. Requests come with
priorities, tenants, choices, shared prefixes and salts; some are cancelled, aborted, run out of time or are refused.
"""

import queue
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import code_pb2

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from tests.cluster import Cluster
from tests.services.served import finish, logprobs, request, tokens, usage, wait_until
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.services
BLOCKS = 16  # of 16 tokens; one choice needs up to six
COUNT, AT_ONCE = 100, 16
FLAGS = dict(kv_blocks=BLOCKS, max_num_seqs=8, max_batch_tokens=48, max_seq_len=128, max_queue=24, ageing=2)
CONTROL = request([9, 8, 7] * 6, seed=5, max_tokens=24, ignore_eos=True, logprobs=0)


@dataclass
class Told:
    """One request, its choices and everything that its reader saw."""

    kind: int
    n: int
    fate: str  # what was done to it: nothing, cancel, abort, timeout
    code: str = ""
    events: tuple = ()
    refusals: int = 0  # before it was admitted


def message(kind, **more):
    """One of 18 requests: three families of prompts that share 40 tokens each, in one of two salts."""
    rng = random.Random(kind)
    prompt = [60 + kind % 3] * 40 + [rng.randrange(200) for _ in range(rng.randrange(1, 9))]
    sampling = dict(seed=kind, n=1 + kind % 3, max_tokens=rng.randrange(8, 40), ignore_eos=True, logprobs=0)
    return request(prompt, cache_salt=str(kind % 2), **sampling, **more)


def outcome(events, n):
    return [(tokens(events, index), logprobs(events, index)) for index in range(n)]


class Clients:
    """Single calls from threads, and one stream that carries many."""

    def __init__(self, stub):
        self._stub = stub

    def single(self, at):
        rng = random.Random(at)
        kind = rng.randrange(18)
        told = Told(kind, 1 + kind % 3, rng.choice(["nothing"] * 3 + ["cancel", "abort", "timeout"]))
        more = {"timeout_ms": rng.randrange(20, 400)} if told.fate == "timeout" else {}
        name = f"single-{at}"
        ask = message(kind, request_id=name, priority=rng.randrange(-1, 2), tenant=rng.choice("abc"), **more)
        patience = rng.randrange(0, 12)  # events that it waits for
        while True:
            told.code, told.events = self._read(ask, told.fate, patience)
            if told.code != "RESOURCE_EXHAUSTED":
                return told
            told.refusals += 1
            time.sleep(0.2)

    def _read(self, ask, fate, patience):
        events, call = [], self._stub.Generate(ask, timeout=120)
        try:
            for event in call:
                events.append(event)
                if len(events) > patience and fate == "cancel":
                    call.cancel()
                elif len(events) == patience + 1 and fate == "abort":
                    self._stub.Abort(pb.AbortRequest(request_ids=[ask.request_id]))
        except grpc.RpcError as error:
            return error.code().name, tuple(events)
        return "OK", tuple(events)

    def many(self, count):
        outbox = queue.Queue()
        told, cancelled = {}, set()
        rng = random.Random(count)
        for at in range(count):
            kind, name = rng.randrange(18), f"many-{at}"
            told[name] = Told(kind, 1 + kind % 3, rng.choice(["nothing", "nothing", "cancel", "timeout"]))
            more = {"timeout_ms": rng.randrange(20, 400)} if told[name].fate == "timeout" else {}
            ask = message(kind, request_id=name, priority=rng.randrange(-1, 2), tenant=rng.choice("abc"), **more)
            outbox.put(pb.ClientMessage(request=ask))
        open_names = set(told)
        for group in self._stub.GenerateMany(iter(outbox.get, None), timeout=120):
            for event in group.events:
                one = told[event.request_id]
                one.events += (event,)
                if event.HasField("usage") or event.HasField("status"):
                    assert not one.code, "two terminal events"
                    one.code = code_pb2.Code.Name(event.status.code)
                    open_names.discard(event.request_id)
                elif one.fate == "cancel" and event.request_id not in cancelled:
                    cancelled.add(event.request_id)
                    outbox.put(pb.ClientMessage(cancel=event.request_id))
            if not open_names:
                outbox.put(None)
        return list(told.values())


def check_terminal(told):
    """Its one terminal event is the last, and what it says agrees with what came before."""
    events = list(told.events)
    if told.code == "RESOURCE_EXHAUSTED":
        assert not any(event.token_ids for event in events), "refused and yet begun"
        return
    if told.fate == "cancel" and told.code == "CANCELLED" and not events[-1].HasField("usage"):
        assert not any(event.HasField("status") for event in events)
        return  # its reader went away before the end
    assert usage(events).completion_tokens == sum(len(event.token_ids) for event in events)
    reasons = {finish(events, index).reason for index in range(told.n)}
    if told.code == "OK":
        assert reasons == {pb.FINISH_REASON_LENGTH}
    else:
        assert told.code == ("DEADLINE_EXCEEDED" if told.fate == "timeout" else "CANCELLED") and told.fate != "nothing"
        assert pb.FINISH_REASON_ABORT in reasons or told.fate == "cancel"  # a cancel may come just after the end


def values_of(stub):
    return stub.Stats(pb.StatsRequest(), timeout=10).values


def is_idle(stub):
    """Every block is free or cached, nothing runs or waits, nobody listens."""
    values = values_of(stub)
    left = sum(values[f"requests_{name}"] for name in ("running", "waiting", "live")) + values["kv_blocks_held"]
    return left == 0 and values["kv_blocks_free"] + values["kv_blocks_cached"] == values["kv_blocks"] == BLOCKS


def total(values, name):
    return sum(value for key, value in values.items() if key.startswith(name + "{"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags", [{}, {"no_forecast": True, "fair_tenants": True, "order": "makespan"}], ids=["default", "other"]
)
def test_everything_at_once_loses_doubles_and_changes_nothing(tmp_path, flags):
    model = make_tiny(tmp_path / "tiny")
    with Cluster(model, dtype="float32", check_invariants=True, **FLAGS, **flags) as cluster:
        with grpc.insecure_channel(cluster.address) as channel:
            stub = rpc.GenerationStub(channel)
            clients, controls, stop = Clients(stub), [], threading.Event()

            def ask_control():
                try:
                    return outcome(list(stub.Generate(CONTROL, timeout=120)), 1)
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    return None

            def keep_asking():
                while not stop.is_set():
                    controls.append(ask_control())
                    time.sleep(0.05)

            control = ask_control()
            with ThreadPoolExecutor(AT_ONCE + 2) as pool:
                asking = pool.submit(keep_asking)
                stream = pool.submit(clients.many, COUNT // 4)
                told = list(pool.map(clients.single, range(COUNT)))
                told += stream.result()
                stop.set()
                asking.result()

            wait_until(lambda: is_idle(stub), 10)
            values = values_of(stub)
            ends = Counter(one.code for one in told)
            assert ends["OK"] > COUNT // 4 and ends["CANCELLED"] > 5 and ends["DEADLINE_EXCEEDED"] > 3, ends
            for one in told:
                check_terminal(one)
            admitted = [one for one in told if one.code != "RESOURCE_EXHAUSTED"]
            answered = sum(one is not None for one in controls) + 1
            assert total(values, "requests_finished_total") == sum(one.n for one in admitted) + answered
            refusals = ends["RESOURCE_EXHAUSTED"] + sum(one.refusals for one in told) + controls.count(None)
            assert total(values, "requests_refused_total") == refusals > 0
            assert values["recoveries_total"] == 0
            assert values["preemptions_total"] > 0 or "no_forecast" not in flags

            # What was told to the end is what each is told alone; the rest is a beginning of it.
            alone = {}
            for one in told:
                if one.kind not in alone:
                    alone[one.kind] = outcome(list(stub.Generate(message(one.kind), timeout=60)), one.n)
                for index, (ids, scores) in enumerate(outcome(one.events, one.n)):
                    whole_ids, whole_scores = alone[one.kind][index]
                    assert ids == whole_ids[: len(ids)] and scores == whole_scores[: len(scores)]
                    assert one.code != "OK" or len(ids) == len(whole_ids)
            assert len([one for one in controls if one is not None]) > 2
            assert all(one is None or one == control for one in controls)
            assert ask_control() == control
            check_cached_tokens(stub)
            wait_until(lambda: is_idle(stub), 10)


def check_cached_tokens(stub):
    """What usage says was found was there: whole blocks of the prompt in the same salt, and never its last token."""

    def cached(prompt, salt="fresh", n=1):
        before = values_of(stub)
        asked = request(prompt, cache_salt=salt, seed=1, n=n, max_tokens=2, ignore_eos=True)
        found = usage(list(stub.Generate(asked, timeout=60))).cached_tokens
        wait_until(lambda: is_idle(stub), 10)
        after = values_of(stub)
        if n == 1:
            assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == found
            assert after["scheduled_prompt_tokens_total"] - before["scheduled_prompt_tokens_total"] == (
                len(prompt) - found
            )
        return found

    base = list(range(50))
    assert cached(base) == 0
    assert cached(base) == 48
    assert cached(base[:48]) == 47  # every block is there; the last token is computed again
    assert cached(base[:33]) == 32
    assert cached([*base[:20], 300, *base[21:]]) == 16
    assert cached([300, *base[1:]]) == 0
    assert cached(base, salt="other") == 0
    assert cached([301] * 40, n=3) == 32  # two of three wait for the first one's blocks


@pytest.mark.parametrize("spoil", ["second end", "lost token", "lost choice", "token after a refusal"])
def test_a_spoilt_answer_is_noticed(spoil):
    event = pb.GenerateEvent
    events = [event(token_ids=[5, 6], finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH)), event(token_ids=[7], index=1)]
    events.append(event(index=1, finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH), usage=pb.Usage(completion_tokens=3)))
    code = "OK"
    check_terminal(Told(1, 2, "nothing", code, tuple(events)))
    if spoil == "second end":
        events.insert(1, events[0])
    elif spoil == "lost token":
        del events[1]
    elif spoil == "lost choice":
        events[0].ClearField("finish")
    else:
        code = "RESOURCE_EXHAUSTED"
    with pytest.raises(AssertionError):
        check_terminal(Told(1, 2, "nothing", code, tuple(events)))
