"""Every rule of a request's fields: what is refused names the field, what is absent differs from zero."""

import logging
import math

import numpy as np
import pytest

from protos import generation_pb2 as pb
from protos.step import int32s
from scheduler_svc import limits, logs, sampling_fields, statuses
from scheduler_svc.sampling_fields import ModelFacts
from scheduler_svc.validation import InvalidRequest, WrongFingerprint, prepare, prompt_ids, seed_of
from tests.services.served import request

V, CONTEXT, EOS = 128, 64, 2


def encode_chat(messages, add_generation_prompt):
    if any(message["role"] == "nobody" for message in messages):
        raise ValueError("unknown role")
    return [5] * len(messages) + [6] * add_generation_prompt


FACTS = ModelFacts(V, CONTEXT, frozenset({EOS}), "f00d", lambda text: [ord(c) % V for c in text], encode_chat)
BARE = ModelFacts(V, CONTEXT, frozenset({EOS}), "f00d")


def check(message, facts=FACTS, request_id="r", **more):
    prompt = prompt_ids(message, facts)
    return prepare(message, prompt, facts, key=1, request_id=request_id, now=100.0, **more)


def refused(message, facts=FACTS):
    with pytest.raises(InvalidRequest) as error:
        check(message, facts)
    return {violation.field: violation.description for violation in error.value.violations}


def columns(request):
    """A core Request as comparable values."""
    found = {name: getattr(request, name) for name in type(request).__slots__ if name != "sampling"}
    found |= {f"sampling.{name}": getattr(request.sampling, name) for name in type(request.sampling).__slots__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, -1e-9, math.nan, math.inf, -math.inf]),
        ("top_p", [0.0, -0.5, 1.0001, math.nan, math.inf]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-2, -(1 << 62)]),
        ("presence_penalty", [math.nan, math.inf, 1e30]),
        ("frequency_penalty", [math.nan, -math.inf, -1e30]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf, 1e30]),
        ("n", [0, -1, limits.MAX_CHOICES + 1]),
        ("max_tokens", [-1, 0, CONTEXT, 2**31 - 1, 2**63 - 1]),
        ("min_tokens", [-1, CONTEXT]),
        ("logprobs", [-1, 21, V, V + 1]),
        ("prompt_logprobs", [-1, 21]),
        ("logprob_mode", [7]),
        ("stop_token_ids", [[V], [-1], [2**62]]),
        ("bad_token_ids", [[V], [-1], list(range(V))]),
        ("allowed_token_ids", [[V], [-1]]),
        ("logit_bias", [{V: 1.0}, {-1: 1.0}]),
    ],
)
def test_values_outside_a_field_are_refused_by_its_name(field, values):
    for value in values:
        found = refused(request(**{field: value}))
        assert list(found) == [f"sampling.{field}"], (value, found)


def test_values_at_the_edge_of_a_field_are_accepted():
    edges = dict(
        temperature=[0.0, 1e-38, 1e6],
        top_p=[1e-9, 1.0],
        min_p=[0.0, 1.0],
        top_k=[-1, 0, 1, V, 2**62],
        presence_penalty=[-2.0, 2.0],
        repetition_penalty=[0.5, 2.0],
        n=[1, limits.MAX_CHOICES],
        max_tokens=[1, CONTEXT - 3],
        min_tokens=[0, CONTEXT - 3],
        logprobs=[0, 1, 20],
        prompt_logprobs=[0, 20],
        stop_token_ids=[[], [0], [V - 1]],
        logit_bias=[{0: -100.0, V - 1: 1e30}],
        seed=[0, 1, 2**31, 2**32, 2**63, 2**64 - 1],
    )
    for field, values in edges.items():
        for value in values:
            check(request(**{field: value}))


def test_no_bias_makes_other_legal_values_overflow():
    for bias in (3.4e38, -3.4e38, math.inf, math.nan):
        assert list(refused(request(logit_bias={3: bias}))) == ["sampling.logit_bias[3]"]
    largest = np.float32(limits.MAX_LOGIT_BIAS) * np.float32(limits.MAX_REPETITION_PENALTY)
    assert np.isfinite(largest / np.float32(sampling_fields.limits.GREEDY_TEMPERATURE))


def test_lists_whose_number_is_wrong_are_not_walked():
    many = request(max_tokens=5)
    many.resume.choices.extend([pb.ResumedChoice(token_ids=[V + 5])] * 1000)
    assert list(refused(many)) == ["resume.choices"]
    assert list(refused(request(logit_bias={i: 1.0 for i in range(V + 1)}))) == ["sampling.logit_bias"]


def test_a_status_fits_a_header_whatever_its_text_is():
    for text in ("x" * 5000, "日" * 5000, "😀" * 5000, "\n" * 5000):
        message = statuses.of_error(WrongFingerprint(text)).message
        size = sum(1 if " " <= c <= "~" else 3 * len(c.encode()) for c in message)
        assert 900 < size <= statuses.MAX_MESSAGE_BYTES


def test_a_name_cannot_forge_a_line_of_the_log():
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", (), None)
    record.fields = {"request_id": "a\nlockstep: ERROR all is lost", "tenant": "\x1b[31mred", "text": "日 b"}
    line = logs.TextLines("lockstep").format(record)
    assert "\n" not in line and "\x1b" not in line and "text=日 b" in line


def test_absent_fields_equal_the_defaults_spelled_out():
    spelled = request(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, n=1, min_tokens=0, ignore_eos=False, skip_special_tokens=True, seed=1,
        include_stop_str_in_output=False, logprob_mode=pb.LOGPROB_MODE_TEMPERED, max_tokens=CONTEXT - 3,
    )  # fmt: skip
    absent = check(request(seed=1))
    assert columns(absent.request) == columns(check(spelled).request)
    assert absent.text.skip_special_tokens and not check(request(skip_special_tokens=False)).text.skip_special_tokens


def test_an_explicit_zero_is_not_an_absent_field():
    assert check(request(temperature=0.0)).request.sampling.temperature == 0.0
    assert check(request()).request.sampling.temperature == 1.0
    assert check(request(seed=0)).request.seed == 0 != check(request()).request.seed == seed_of("r")
    assert check(request(logprobs=0)).request.sampling.logprobs == 0
    assert check(request()).request.sampling.logprobs is None
    assert not check(request()).wants_logprobs and check(request(logprobs=0)).wants_logprobs
    assert check(request(max_tokens=0, prompt_logprobs=0)).request.max_tokens == 0
    assert "sampling.n" in refused(request(n=0)) and "timeout_ms" in refused(request(timeout_ms=0))
    assert "sampling.max_tokens" in refused(request(max_tokens=0))


def test_temperatures_up_to_1e_5_are_greedy():
    for value in (0.0, 1e-38, 1e-12, 1e-6, 1e-5):
        assert check(request(temperature=value)).request.sampling.temperature == 0.0
    assert check(request(temperature=1e-4)).request.sampling.temperature > 0


def test_top_k_beyond_the_vocabulary_is_off():
    assert [check(request(top_k=k)).request.sampling.top_k for k in (-1, 0, V, 9_999_999, 5)] == [0, 0, 0, 0, 5]


def test_prompts_at_the_limit():
    assert check(request([1] * 63)).request.max_tokens == 1
    assert check(request([1] * 64, max_tokens=0, prompt_logprobs=0)).request.max_tokens == 0
    assert "no room for output: the prompt has 64 tokens, the context is 64" in refused(request([1] * 64)).values()
    assert "64 tokens and max_tokens 1 are 65, the context is 64" in str(refused(request([1] * 64, max_tokens=1)))
    assert "the prompt has 65 tokens, the context is 64" in str(refused(request([1] * 65, max_tokens=1)))
    assert check(request([1] * 40, max_tokens=24)).request.max_tokens == 24
    assert "40 tokens and max_tokens 25 are 65, the context is 64" in str(refused(request([1] * 40, max_tokens=25)))


def test_prompts_that_are_empty_or_outside_the_vocabulary():
    assert "prompt" in refused(request(None))
    assert "token_ids.ids" in refused(request([]))
    assert "text" in refused(request(text=""))
    assert list(refused(request([1, V]))) == ["token_ids.ids[1]"]
    assert check(request([V - 1])).request.prompt.tolist() == [V - 1]
    assert "5279552648203111001 is outside the vocabulary [0, 128)" in str(refused(request([5279552648203111001])))
    assert "18446744073709551615" in str(refused(request([2**64 - 1])))  # what -1 is on the wire


def test_chat_and_text_need_a_tokenizer_and_say_so():
    assert check(request(chat=[("user", "hi")])).request.prompt.tolist() == [5, 6]
    message = request(chat=[("user", "hi")])
    message.chat.add_generation_prompt = False
    assert check(message).request.prompt.tolist() == [5]
    assert "unknown role" in str(refused(request(chat=[("nobody", "hi")])))
    assert "has no role" in str(refused(request(chat=[("", "hi")])))
    assert "chat.messages" in refused(request(chat=[])) or "prompt" in refused(request(chat=[]))
    for message in (request(text="hi"), request(chat=[("user", "hi")])):
        assert "no tokenizer" in str(refused(message, BARE))
    assert "sampling.stop" in refused(request(stop=["x"]), BARE)


def test_lists_and_names_have_bounds():
    assert "sampling.stop" in refused(request(stop=["x"] * (limits.MAX_STOP_STRINGS + 1)))
    assert "sampling.stop[1]" in refused(request(stop=["x", "y" * (limits.MAX_STOP_CHARACTERS + 1)]))
    assert "sampling.stop[0]" in refused(request(stop=[""]))
    for name in ("request_id", "tenant", "cache_salt"):
        assert name in refused(request(**{name: "é" * 129}))
    assert "request_id" in refused(request(request_id=""))


def test_a_mask_that_leaves_nothing_is_refused():
    assert "sampling.allowed_token_ids" in refused(request(allowed_token_ids=[5], bad_token_ids=[5]))
    assert "sampling.min_tokens" in refused(request(allowed_token_ids=[EOS], min_tokens=1))
    check(request(allowed_token_ids=[EOS]))
    check(request(allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True))


def test_all_violations_are_told_at_once():
    assert set(refused(request(top_p=0.0, n=0, temperature=-1.0))) == {
        "sampling.top_p",
        "sampling.n",
        "sampling.temperature",
    }


def test_ignore_eos_drops_the_union_and_keeps_the_users_ids():
    assert check(request(ignore_eos=True, stop_token_ids=[9])).request.sampling.stop_ids.tolist() == [9]
    assert check(request(stop_token_ids=[9])).request.sampling.stop_ids.tolist() == [EOS, 9]
    assert check(request(stop_token_ids=[9])).request.eos_ids == {EOS}


def test_deadlines_take_the_earlier_of_call_and_request():
    assert check(request()).request.deadline is None
    assert check(request(timeout_ms=500)).request.deadline == 100.5
    assert check(request(timeout_ms=500), deadline=100.1).request.deadline == 100.1
    assert check(request(), deadline=103.0).request.deadline == 103.0
    assert "timeout_ms" in refused(request(timeout_ms=-5))


def test_resume_brings_seed_and_tokens_of_every_choice():
    resumed = check(request(n=2, resume=(7, [[1, 3], []]), max_tokens=5)).request
    assert resumed.seed == 7 and [column.tolist() for column in resumed.resume] == [[1, 3], []]
    assert check(request(seed=9, resume=(9, [[1]]))).request.seed == 9
    assert check(request(resume=(None, [[1]]))).request.seed == seed_of("r")
    assert "resume.seed" in refused(request(seed=8, resume=(9, [[1]])))
    assert "resume.choices" in refused(request(n=2, resume=(1, [[1]])))
    assert "resume.choices[0].token_ids" in refused(request(resume=(1, [[V]])))
    assert "resume.choices[0].token_ids" in refused(request(max_tokens=2, resume=(1, [[1, 3, 4]])))
    assert "which ended the choice" in str(refused(request(resume=(1, [[1, EOS, 4]]))))
    check(request(resume=(1, [[1, EOS]])))
    check(request(min_tokens=3, resume=(1, [[1, EOS, 4]])))


def test_another_fingerprint_is_no_field_error():
    check(request(expected_fingerprint="f00d"))
    for expected in ("dead", ""):
        with pytest.raises(WrongFingerprint, match="f00d"):
            check(request(expected_fingerprint=expected))


def test_the_seed_of_an_id_is_fixed():
    """Clients rely on it across releases: a retry under one id must draw the same."""
    assert seed_of("r") == seed_of("r") != seed_of("s")
    assert seed_of("hello") == 9022087748821825191


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (
            lambda m: m.setattr(
                sampling_fields.SamplingFields, "get", lambda self, name, default: getattr(self.params, name) or default
            ),
            test_an_explicit_zero_is_not_an_absent_field,
        ),
        (
            lambda m: m.setattr(
                sampling_fields.SamplingFields, "number", lambda self, name, default, *_, **__: default
            ),
            test_all_violations_are_told_at_once,
        ),
        (lambda m: m.setattr(limits, "GREEDY_TEMPERATURE", 0.0), test_temperatures_up_to_1e_5_are_greedy),
        (
            lambda m: m.setattr(sampling_fields.SamplingFields, "something_survives", lambda *_: None),
            test_a_mask_that_leaves_nothing_is_refused,
        ),
    ],
    ids=["truthiness", "ranges unchecked", "greedy only at 0", "empty masks"],
)
def test_broken_rules_do_not_pass(mutate, test, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


def test_columns_are_int32():
    assert check(request([1, 2], stop_token_ids=[4, 3, 4])).request.prompt.dtype == int32s().dtype
