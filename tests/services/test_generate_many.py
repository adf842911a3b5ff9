"""Many requests over one stream: the same answers as one by one, one message a step, errors that end only their own."""

import queue

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from protos import generation_pb2 as pb
from scheduler_svc import limits, readers
from tests.services.pseudo import Pseudo, greedy
from tests.services.served import Served, finish, logprobs, request, text, tokens, usage, wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("tokenizer"), Pseudo(step_s=0.005)) as served:
        yield served


class Many:
    """One GenerateMany call, driven by hand."""

    def __init__(self, served):
        self._outbox = queue.Queue()
        self.call = served.stub.GenerateMany(iter(self._outbox.get, None), timeout=30)
        self.messages = []

    def send(self, *messages):
        for message in messages:
            self._outbox.put(pb.ClientMessage(request=message))

    def cancel(self, request_id):
        self._outbox.put(pb.ClientMessage(cancel=request_id))

    def close(self):
        self._outbox.put(None)

    def read(self, count=None):
        """Messages until the end, or `count` of them."""
        for message in self.call:
            self.messages.append(message)
            if count is not None and len(self.messages) >= count:
                break
        return self.events()

    def events(self):
        found = {}
        for message in self.messages:
            for event in message.events:
                found.setdefault(event.request_id, []).append(event)
        return found


def many(served, *messages):
    call = Many(served)
    call.send(*messages)
    call.close()
    return call.read()


def settings(at):
    return dict(prompt=[at + 1] * 5, max_tokens=20, seed=at, ignore_eos=True, logprobs=at % 3, n=1 + at % 2)


def test_answers_are_those_of_single_requests(served):
    single = [served.generate(**settings(at)) for at in range(8)]
    events = many(served, *(request(request_id=str(at), **settings(at)) for at in range(8)))
    for at in range(8):
        for index in range(1 + at % 2):
            got, want = events[str(at)], single[at]
            assert (tokens(got, index), text(got, index)) == (tokens(want, index), text(want, index))
            assert logprobs(got, index) == logprobs(want, index)
            assert finish(got, index) == finish(want, index)
        assert usage(events[str(at)]).completion_tokens == usage(single[at]).completion_tokens
        assert events[str(at)][0].started.request_id == str(at)
        assert not any(event.HasField("status") for event in events[str(at)])
    served.wait_idle()


def test_one_message_a_step_carries_all_requests(served):
    call = Many(served)
    call.send(*(request(request_id=str(at), prompt=[at], max_tokens=30, ignore_eos=True) for at in range(8)))
    call.close()
    call.read()
    assert len(call.messages) < 60  # 240 tokens
    assert max(len(message.events) for message in call.messages) == 8


def test_an_error_ends_only_its_own_request(served):
    events = many(
        served,
        request(request_id="good", max_tokens=5, temperature=0, ignore_eos=True),
        request(request_id="bad", top_p=0.0),
        request(request_id="good", max_tokens=5),
        request(max_tokens=5),
    )
    assert tokens(events["good"]) == greedy([1, 2, 3], 5)
    codes = {name: [e.status.code for e in rows if e.HasField("status")] for name, rows in events.items()}
    assert codes == {
        "good": [code_pb2.ALREADY_EXISTS],
        "bad": [code_pb2.INVALID_ARGUMENT],
        "": [code_pb2.INVALID_ARGUMENT],
    }
    detail = error_details_pb2.BadRequest()
    assert events["bad"][0].status.details[0].Unpack(detail)
    assert detail.field_violations[0].field == "sampling.top_p"


def test_cancel_ends_one_request_with_a_status(served):
    call = Many(served)
    call.send(*(request(request_id=name, max_tokens=60, ignore_eos=True, temperature=0) for name in "ab"))
    call.read(3)
    call.cancel("a")
    call.cancel("nobody")
    call.close()
    events = call.read()
    assert events["a"][-1].status.code == code_pb2.CANCELLED
    assert finish(events["a"]).reason == pb.FINISH_REASON_ABORT
    assert tokens(events["a"]) == greedy([1, 2, 3], len(tokens(events["a"])))
    assert tokens(events["b"]) == greedy([1, 2, 3], 60)
    served.wait_idle()


def test_requests_may_come_while_others_run_and_ids_are_reusable(served):
    call = Many(served)
    for round_number in range(3):
        call.send(request(request_id="again", max_tokens=3, temperature=0, ignore_eos=True))
        wanted = round_number + 1
        while sum(e.HasField("usage") for e in call.events().get("again", [])) < wanted:
            call.read(len(call.messages) + 1)
    call.close()
    assert tokens(call.read()["again"]) == greedy([1, 2, 3], 3) * 3


def test_a_stream_that_breaks_cancels_all_of_it(served):
    call = Many(served)
    call.send(*(request(request_id=str(at), max_tokens=60, ignore_eos=True) for at in range(6)))
    call.read(2)
    call.call.cancel()
    served.wait_idle()
    with pytest.raises(grpc.RpcError):
        call.read()


def test_a_reader_that_stops_loses_its_requests_and_frees_their_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 100_000)
    monkeypatch.setattr(readers.Pace.break_off_stalled, "__defaults__", (1.0,))
    with Served(tmp_path, Pseudo(max_position_embeddings=8192), max_seq_len=8192, num_blocks=2048) as served:
        call = Many(served)
        big = dict(max_tokens=4000, ignore_eos=True, logprobs=20, return_logits=True)
        call.send(*(request(request_id=str(at), **big) for at in range(3)))
        call.read(1)
        assert tokens(served.generate(temperature=0, max_tokens=5, ignore_eos=True)) == greedy([1, 2, 3], 5)
        wait_until(lambda: served.stats().values["requests_running"] == 0, 60)
        served.wait_idle()
        try:
            call.close()
            events = call.read()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            codes = {event.status.code for rows in events.values() for event in rows if event.HasField("status")}
            assert codes == {code_pb2.RESOURCE_EXHAUSTED}


def test_a_flood_of_bad_requests_that_nobody_reads_is_bounded(served, monkeypatch):
    monkeypatch.setattr(limits, "MAX_UNREAD_REFUSALS", 5)
    made = []
    original = readers.ManyReader.refuse

    def refuse(self, request_id, status):
        original(self, request_id, status)
        made.append(len(self._refusals))

    monkeypatch.setattr(readers.ManyReader, "refuse", refuse)
    events = many(served, *(request(request_id=str(at), top_p=0.0) for at in range(300)))
    assert len(events) == 300 == len(made) and max(made) <= 5


def test_an_empty_stream_ends(served):
    assert many(served) == {}


def test_status_of_a_request_that_ran_out_of_time(served):
    events = many(served, request(request_id="late", timeout_ms=60, max_tokens=60, ignore_eos=True))
    assert events["late"][-1].status.code == code_pb2.DEADLINE_EXCEEDED
    assert sum(event.HasField("status") for event in events["late"]) == 1


def test_dropped_statuses_do_not_pass(served, monkeypatch):
    original = readers.ManyReader._events

    def without_status(self):
        events = original(self)
        for event in events:
            event.ClearField("status")
        return events

    monkeypatch.setattr(readers.ManyReader, "_events", without_status)
    for test in (test_an_error_ends_only_its_own_request, test_cancel_ends_one_request_with_a_status):
        with pytest.raises(AssertionError):
            test(served)
    wait_until(lambda: served.stats().values["requests_live"] == 0)
