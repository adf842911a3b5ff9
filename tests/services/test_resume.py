"""A request that goes on after tokens its client already has is the tail of the one request it would have been."""

import grpc
import pytest

from protos import generation_pb2 as pb
from scheduler_svc import front_end, known_model
from tests.services.pseudo import EOS, Pseudo, ids_of
from tests.services.served import Served, finish, logprobs, request, text, tokens, usage

SCRIPTS = {(10,): ids_of("one DEFGHIJ two"), (11,): list("a😀b日c".encode()), (12,): [65, EOS, 66]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("tokenizer"), Pseudo(scripts=SCRIPTS, step_s=0.004)) as served:
        yield served


VARIANTS = {
    "greedy": dict(temperature=0.0),
    "seeded": dict(),
    "penalties": dict(repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.4),
    "nucleus": dict(top_p=0.8, top_k=20, min_p=0.01),
    "minimum": dict(min_tokens=18, stop_token_ids=list(range(0, 200, 3))),
    "logprobs": dict(logprobs=2),
    "stop string": dict(prompt=[10], stop=["DEFGHIJ"]),
    "characters": dict(prompt=[11]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_rest_is_the_rest_of_one_run(served, name):
    fields = dict(max_tokens=20, seed=11, ignore_eos=True) | VARIANTS[name]
    whole = served.generate(**fields)
    out, values = tokens(whole), logprobs(whole)
    assert len(whole) > 4
    for received in range(len(whole)):  # a client holds whole events
        count = len(tokens(whole[:received]))
        rest = served.generate(**fields, resume=(11, [out[:count]]))
        assert tokens(rest) == out[count:]
        assert logprobs(rest) == values[count:]
        assert text(whole[:received]) + text(rest) == text(whole)
        assert finish(rest).reason == finish(whole).reason
        assert finish(rest).stop_reason == finish(whole).stop_reason
        assert usage(rest).completion_tokens == len(out) and usage(rest).prompt_tokens == usage(whole).prompt_tokens


def test_every_choice_goes_on_from_its_own_place(served):
    fields = dict(n=3, seed=5, max_tokens=15, ignore_eos=True)
    whole = served.generate(**fields)
    rows = [tokens(whole, index) for index in range(3)]
    rest = served.generate(**fields, resume=(5, [rows[0][:4], [], rows[2]]))
    assert [tokens(rest, index) for index in range(3)] == [rows[0][4:], rows[1], []]
    assert finish(rest, 2).reason == pb.FINISH_REASON_LENGTH
    assert usage(rest).completion_tokens == 45


@pytest.mark.parametrize(
    ("fields", "resumed", "reason"),
    [
        (dict(prompt=[10], stop=["DEFGHIJ"], max_tokens=30), ids_of("one DEFGHIJ"), dict(text="DEFGHIJ")),
        (dict(prompt=[12], max_tokens=30), [65, EOS], dict(token_id=EOS)),
        (dict(prompt=[12], max_tokens=2, ignore_eos=True), [65, EOS], None),
    ],
    ids=["stop string", "end of sequence", "max_tokens"],
)
def test_tokens_that_already_end_get_their_terminal_event(served, fields, resumed, reason):
    events = served.generate(seed=1, resume=(1, [resumed]), **fields)
    assert not tokens(events) and text(events) == ""
    assert usage(events).completion_tokens == len(resumed)
    if reason is None:
        assert finish(events).reason == pb.FINISH_REASON_LENGTH
    else:
        assert finish(events).reason == pb.FINISH_REASON_STOP
        assert finish(events).stop_reason == pb.StopReason(**reason)
    assert events[0].HasField("started")
    served.wait_idle()


def test_tokens_beyond_a_stop_string_cannot_have_been_received(served):
    error = served.refused(prompt=[10], stop=["DEF"], max_tokens=30, resume=(1, [ids_of("one DEFGH")]))
    assert error.code().name == "INVALID_ARGUMENT" and "resume.choices[0].token_ids" in error.details()


def test_another_fingerprint_is_refused_before_anything_runs(served):
    digest = served.generate(max_tokens=1)[0].started.fingerprint.digest
    assert served.stub.GetModelInfo(pb.GetModelInfoRequest()).fingerprint.digest == digest
    assert served.generate(max_tokens=1, expected_fingerprint=digest)
    error = served.refused(max_tokens=1, expected_fingerprint="0" * 32)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and digest in error.details()


def test_a_second_replica_takes_the_stream_over(served, tmp_path):
    fields = dict(seed=21, max_tokens=20, ignore_eos=True, repetition_penalty=1.2)
    whole = served.generate(**fields)
    with Served(tmp_path, Pseudo(scripts=SCRIPTS)) as other:
        digest = whole[0].started.fingerprint.digest
        rest = other.generate(**fields, resume=(21, [tokens(whole)[:9]]), expected_fingerprint=digest)
    assert tokens(rest) == tokens(whole)[9:]


def test_resumed_tokens_that_are_forgotten_do_not_pass(served, monkeypatch):
    original = front_end.FrontEnd._build

    def without_text(self, prepared, model):
        stream, stops = original(self, prepared, model)
        for choice in stream.choices:
            choice.text.num_tokens = 0
        return stream, stops

    monkeypatch.setattr(front_end.FrontEnd, "_build", without_text)
    with pytest.raises(AssertionError):
        test_every_choice_goes_on_from_its_own_place(served)
    monkeypatch.setattr(known_model, "ChoiceText", lambda *args, **kw: Forgetful(*args, **kw))
    with pytest.raises(AssertionError):
        test_the_rest_is_the_rest_of_one_run(served, "characters")


class Forgetful(known_model.ChoiceText):
    """Starts its text anew with the first pushed token."""

    def push(self, token_id):
        self._detokenizer = type(self._detokenizer)(self._detokenizer._tokenizer, [], True)
        return super().push(token_id)


def test_a_request_cannot_resume_what_it_does_not_ask_for(served):
    error = served.refused(request(n=2, resume=(1, [[1]])))
    assert "resume.choices" in error.details()
