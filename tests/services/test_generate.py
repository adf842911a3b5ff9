"""Generate over the real service: what a stream says, for every kind of field and every kind of end."""

import itertools
import json

import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import generation_pb2 as pb
from scheduler_svc import streams
from scheduler_svc.streams import Choice, Stream
from tests.services.pseudo import EOS, WORD, Pseudo, V, greedy, ids_of, logits_after
from tests.services.served import Served, finish, logprobs, request, text, tokens, usage

STOP_TEXT = "hello DEFGHIJ and more"
PROMPTS = {
    (10,): ids_of(STOP_TEXT),
    (11,): [ord("a"), ord("\n"), *ids_of("bcdefghijklmnop\nq")],
    (12,): [ord("H"), EOS, ord("x")],
    (13,): [*"😀".encode(), ord("!")],
    (14,): [0xE2, 0x82],
    (15,): ids_of("end QQQ"),
    (16,): [WORD["XAB"], WORD["CY"]],
    (17,): [ord("a"), 9, ord("b"), 11, ord("c")],
    (18,): ids_of("x" * 50) + ids_of("STOPPED"),
    (19,): [0xFF, 0x80, ord("a"), 0xF0, 0x9F, ord("b"), 0xC3, 0xA9],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = Pseudo(scripts=PROMPTS, eos=(EOS, 9))
    with Served(tmp_path_factory.mktemp("tokenizer"), model, max_seq_len=512) as served:
        yield served


def decode(served, token_ids):
    return served.server._front.model.tokenizer.decode(token_ids)


def test_first_event_says_what_the_bits_hold_under(served):
    events = served.generate(prompt=[1, 2], max_tokens=3, request_id="mine", seed=0)
    started = events[0].started
    assert (started.request_id, started.seed, started.prompt_tokens) == ("mine", 0, 2)
    assert dict(started.fingerprint.parts) == {"numerics": "pseudo 1", "device": "test", "sample_at": "worker"}
    assert not any(event.HasField("started") for event in events[1:])
    assert events[0].token_ids  # nothing is sent before the first token


def test_an_id_and_a_seed_are_assigned_and_reproduce_the_request(served):
    first = served.generate(max_tokens=8)
    again = served.generate(max_tokens=8, seed=first[0].started.seed)
    assert first[0].started.request_id != again[0].started.request_id
    assert tokens(first) == tokens(again)
    named = [tokens(served.generate(max_tokens=8, request_id="same name")) for _ in range(2)]
    assert named[0] == named[1]


def test_explicit_zero_temperature_is_greedy_and_absence_is_one(served):
    expected = greedy([1, 2, 3], 16)
    for _ in range(5):
        assert tokens(served.generate(temperature=0.0, max_tokens=16, ignore_eos=True)) == expected
    absent = tokens(served.generate(seed=1, max_tokens=16, ignore_eos=True))
    spelled = served.generate(
        seed=1, max_tokens=16, ignore_eos=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, n=1
    )
    assert absent == tokens(spelled) != expected


def test_temperatures_of_every_size_end_well(served):
    """Tiny ones are greedy, none gives a NaN, and a huge one is close to uniform."""
    expected = greedy([1, 2, 3], 8)
    for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e2, 1e6):
        events = served.generate(temperature=temperature, seed=1, logprobs=2, max_tokens=8, ignore_eos=True)
        assert np.isfinite(logprobs(events)).all() and len(tokens(events)) == 8
        if temperature <= 1e-5:
            assert tokens(events) == expected
    wide = served.generate(temperature=1e6, seed=2, n=64, max_tokens=32, ignore_eos=True, timeout=60)
    counts = np.bincount([token for event in wide for token in event.token_ids], minlength=V)
    assert ((counts - 2048 / V) ** 2 / (2048 / V)).sum() < V + 5 * (2 * V) ** 0.5
    assert tokens(served.generate(temperature=0, max_tokens=8, ignore_eos=True)) == expected


def test_filters_that_are_off_and_filters_that_leave_one(served):
    def run(**fields):
        return tokens(served.generate(seed=3, max_tokens=12, ignore_eos=True, **fields))

    free = run()
    for off in (dict(top_k=9_999_999), dict(top_k=-1), dict(top_k=0), dict(top_k=V), dict(top_p=1.0), dict(min_p=0.0)):
        assert run(**off) == free
    assert run(top_p=0.9999999) == free
    for one in (dict(top_k=1), dict(min_p=1.0), dict(top_p=1e-9)):
        assert run(**one) == greedy([1, 2, 3], 12)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_accepted_and_reproducible(served, seed):
    control = tokens(served.generate(temperature=0, max_tokens=5))
    first, second = (served.generate(seed=seed, max_tokens=8, ignore_eos=True) for _ in range(2))
    assert first[0].started.seed == seed and tokens(first) == tokens(second)
    assert tokens(served.generate(temperature=0, max_tokens=5)) == control


def test_choices_are_different_streams_of_one_seed(served):
    four, again = (served.generate(n=4, seed=7, max_tokens=16, ignore_eos=True) for _ in range(2))
    rows = [tokens(four, index) for index in range(4)]
    assert all(one != other for one, other in itertools.combinations(rows, 2))
    assert rows == [tokens(again, index) for index in range(4)]
    for _ in range(2):
        assert tokens(served.generate(n=1, seed=7, max_tokens=16, ignore_eos=True)) == rows[0]
    assert usage(four).completion_tokens == 64 and usage(four).prompt_tokens == 3
    assert [finish(four, index).reason for index in range(4)] == [pb.FINISH_REASON_LENGTH] * 4


def test_logprobs_absent_zero_and_k(served):
    assert not logprobs(served.generate(max_tokens=4))
    for temperature in (0.0, 1.0):
        fields = dict(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True)
        alone = served.generate(logprobs=0, **fields)
        assert len(logprobs(alone)) == 6
        assert not any(entry.alternatives for event in alone for entry in event.alternatives)
        for k in (1, 5, 20):
            events = served.generate(logprobs=k, **fields)
            assert logprobs(events) == logprobs(alone)
            rows = [entry.alternatives for event in events for entry in event.alternatives]
            for row, token, own in zip(rows, tokens(events), logprobs(events)):
                ids, values = [a.token_id for a in row], [a.logprob for a in row]
                assert len(set(ids)) == len(ids) == k
                assert sorted(zip(values, ids), key=lambda pair: (-pair[0], pair[1])) == list(zip(values, ids))
                assert token not in ids or values[ids.index(token)] == own


def test_logprobs_are_the_models_tempered_or_raw(served):
    def reference(temperature):
        known, values = [1, 2, 3], []
        for token in out:
            z = logits_after(known).astype(np.float64) / temperature
            values.append(z[token] - z.max() - np.log(np.exp(z - z.max()).sum()))
            known.append(token)
        return values

    for fields, scale in (
        (dict(temperature=0.6), 0.6),
        (dict(temperature=1.0, top_p=0.8), 1.0),
        (dict(temperature=0.0), 1.0),
        (dict(temperature=0.6, logprob_mode=pb.LOGPROB_MODE_RAW), 1.0),
    ):
        events = served.generate(logprobs=0, seed=5, max_tokens=6, ignore_eos=True, **fields)
        out = tokens(events)
        np.testing.assert_allclose(logprobs(events), reference(scale), atol=1e-4)
        assert finish(events).cumulative_logprob == pytest.approx(sum(logprobs(events)), abs=1e-12)


def test_masks_do_not_leak_into_scores_and_json_stays_strict(served):
    prompt = list(range(30, 45))
    events = served.generate(prompt=prompt, prompt_logprobs=1, top_k=1, max_tokens=4)
    scores = [entry for event in events for entry in event.prompt_logprobs]
    assert len(scores) == len(prompt) and not scores[0].HasField("logprob")
    assert all(np.isfinite(entry.logprob) for entry in scores[1:])
    events = served.generate(prompt=prompt, logprobs=10, top_k=2, allowed_token_ids=[1, 2, 3], max_tokens=4)
    alternatives = [a.logprob for event in events for row in event.alternatives for a in row.alternatives]
    assert all(np.isfinite(alternatives))
    json.dumps(alternatives, allow_nan=False)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompt_scores_do_not_depend_on_cache_or_chunks(served, length):
    prompt = list(range(40, 40 + length))
    reference = []
    for position in range(1, length):
        z = logits_after(prompt[:position]).astype(np.float64)
        reference.append(z[prompt[position]] - z.max() - np.log(np.exp(z - z.max()).sum()))
    for _ in range(2):
        events = served.generate(prompt=prompt, prompt_logprobs=1, max_tokens=0)
        scores = [entry for event in events for entry in event.prompt_logprobs]
        assert len(scores) == length and not scores[0].HasField("logprob")
        np.testing.assert_allclose([entry.logprob for entry in scores[1:]], reference, atol=1e-5)
        assert all(len(entry.alternatives) == 1 for entry in scores[1:])
        assert not tokens(events) and finish(events).reason == pb.FINISH_REASON_LENGTH
        assert usage(events).completion_tokens == 0


def test_logits_of_every_token_come_back(served):
    events = served.generate(temperature=0, return_logits=True, max_tokens=3)
    rows = np.frombuffer(b"".join(event.logits for event in events), "float32").reshape(3, V)
    known = [1, 2, 3]
    for row, token in zip(rows, tokens(events)):
        np.testing.assert_array_equal(row, logits_after(known))
        known.append(token)
    assert {event.logits_dtype for event in events if event.token_ids} == {"float32"}


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens_never_leaks(served, include):
    events = served.generate(prompt=[10], stop=["DEFGHIJ"], include_stop_str_in_output=include, max_tokens=40)
    assert text(events) == ("hello DEFGHIJ" if include else "hello ")
    assert finish(events).reason == pb.FINISH_REASON_STOP and finish(events).stop_reason.text == "DEFGHIJ"
    assert tokens(events) == ids_of("hello DEFGHIJ")  # the completing token is there, nothing after it
    assert usage(events).completion_tokens == 13
    served.wait_idle()


def test_stop_that_begins_inside_a_token(served):
    events = served.generate(prompt=[16], stop=["BC"], max_tokens=10)
    assert text(events) == "XA" and tokens(events) == [WORD["XAB"], WORD["CY"]]


def test_stop_far_from_the_start(served):
    events = served.generate(prompt=[18], stop=["STOP"], max_tokens=60)
    assert text(events) == "x" * 50


def test_held_back_text_is_delivered_at_every_kind_of_end(served):
    for fields in (dict(max_tokens=7), dict(max_tokens=30, stop_token_ids=[ord("Q")])):
        events = served.generate(prompt=[15], stop=["QQQQQQQQ"], **fields)
        if "stop_token_ids" in fields:
            assert text(events) == "end " and finish(events).stop_reason.token_id == ord("Q")
        else:
            assert text(events) == "end QQQ" == decode(served, tokens(events))
            assert finish(events).reason == pb.FINISH_REASON_LENGTH


def test_min_tokens_masks_strings_ids_and_eos_alike(served):
    events = served.generate(prompt=[11], stop=["\n"], min_tokens=10, max_tokens=40)
    assert text(events) == "a\nbcdefghijklmnop" and len(tokens(events)) == 18
    events = served.generate(prompt=[12], min_tokens=2, max_tokens=2, temperature=0)
    assert EOS not in tokens(events) and len(tokens(events)) == 2
    events = served.generate(prompt=[12], max_tokens=9)
    assert tokens(events) == [ord("H"), EOS] and text(events) == "H"
    assert finish(events).stop_reason.token_id == EOS
    many = served.generate(prompt=[12], min_tokens=5, max_tokens=5, temperature=0)
    assert len(tokens(many)) == 5 and not {EOS, 9} & set(tokens(many))


def test_any_id_of_the_eos_union_stops_and_ignore_eos_covers_all(served):
    """The model names 257 and 9, the tokenizer 257: 9 comes second here."""
    assert tokens(served.generate(prompt=[17], max_tokens=20)) == [ord("a"), 9]
    ignoring = served.generate(prompt=[17], max_tokens=20, ignore_eos=True)
    assert len(tokens(ignoring)) == 20 and finish(ignoring).reason == pb.FINISH_REASON_LENGTH
    stopped = served.generate(prompt=[17], max_tokens=20, ignore_eos=True, stop_token_ids=[11])
    assert tokens(stopped) == [ord("a"), 9, ord("b"), 11] and finish(stopped).stop_reason.token_id == 11


@pytest.mark.parametrize("count", [1, 5])
def test_max_tokens_is_exact(served, count):
    events = served.generate(max_tokens=count, ignore_eos=True)
    assert len(tokens(events)) == count == usage(events).completion_tokens
    assert finish(events).reason == pb.FINISH_REASON_LENGTH


def test_max_tokens_absent_runs_to_the_context_limit(served):
    events = served.generate(prompt=[5] * 500, ignore_eos=True)
    assert len(tokens(events)) == 12


def test_characters_arrive_whole_and_joined_text_is_the_decoded_text(served):
    events = served.generate(prompt=[13], max_tokens=5)
    assert text(events) == "😀!"
    assert not any("\ufffd" in event.text for event in events)
    assert [event.text for event in events if "😀" in event.text] and text(
        served.generate(prompt=[14], max_tokens=2)
    ) == "\ufffd"
    broken = served.generate(prompt=[19], max_tokens=8)
    assert text(broken) == decode(served, tokens(broken)) == "\ufffd\ufffda\ufffdbé"


def test_text_and_chat_prompts_are_tokenized_here(served):
    as_text = served.generate(text="abc", temperature=0, max_tokens=5, ignore_eos=True)
    assert tokens(as_text) == tokens(
        served.generate(prompt=ids_of("abc"), temperature=0, max_tokens=5, ignore_eos=True)
    )
    chat = served.generate(chat=[("user", "hi")], temperature=0, max_tokens=5, ignore_eos=True)
    prompt = [256, *ids_of("user\nhi"), 257, 256, *ids_of("assistant\n")]
    assert tokens(chat) == greedy(prompt, 5) and usage(chat).prompt_tokens == len(prompt)
    injected = served.generate(chat=[("user", "{{ 7*7 }}")], max_tokens=1)
    assert usage(injected).prompt_tokens == len(prompt) + len("{{ 7*7 }}") - 2  # never template text


def test_every_violation_is_named_and_a_control_request_is_unchanged(served):
    control = tokens(served.generate(temperature=0, max_tokens=8))
    for message, field in (
        (request(top_p=0.0), "sampling.top_p"),
        (request(prompt=None), "prompt"),
        (request(prompt=[]), "token_ids.ids"),
        (request(text=""), "text"),
        (request([1, V]), "token_ids.ids[1]"),
        (request([2**64 - 1]), "token_ids.ids[0]"),
        (request(logprobs=21), "sampling.logprobs"),
        (request(logprobs=V + 1), "sampling.logprobs"),
        (request(max_tokens=-1), "sampling.max_tokens"),
        (request(max_tokens=0), "sampling.max_tokens"),
        (request([1] * 513), "token_ids.ids"),
        (request(min_tokens=9, max_tokens=8), "sampling.min_tokens"),
        (request(chat=[("stranger", "hi")]), "chat.messages"),
        (request(n=0), "sampling.n"),
    ):
        error = served.refused(message)
        assert error.code().name == "INVALID_ARGUMENT", (field, error)
        detail = error_details_pb2.BadRequest()
        assert rpc_status.from_call(error).details[0].Unpack(detail)
        assert [violation.field for violation in detail.field_violations] == [field]
        assert error.details().startswith(field)  # proxies forward only the message
        assert tokens(served.generate(temperature=0, max_tokens=8)) == control
    served.wait_idle()


def test_what_never_fits_is_refused_with_both_numbers(tmp_path):
    with Served(tmp_path, num_blocks=2, block_size=16, max_seq_len=64) as served:
        error = served.refused(prompt=[1] * 30, max_tokens=10)
        assert error.code().name == "INVALID_ARGUMENT"
        assert "need 3 KV blocks" in error.details() and "there are 2" in error.details()
        assert (
            len(tokens(served.generate(prompt=[1] * 30, max_tokens=3, ignore_eos=True))) == 3
        )  # 33 - 1 tokens fill it


def test_a_pool_that_is_too_small_for_all_changes_no_token(tmp_path):
    """Preempted choices are computed again; nobody sees it."""
    fields = [
        dict(temperature=0.0),
        dict(seed=4),
        dict(seed=5, repetition_penalty=1.3, presence_penalty=0.5),
        dict(seed=6, logprobs=2),
        dict(seed=7, min_tokens=20),
        dict(seed=8, stop=["zzzz"]),
        dict(seed=9, n=2),
        dict(seed=10, frequency_penalty=0.3),
    ]
    messages = [
        request(prompt=[20 + at] * 20, max_tokens=40, ignore_eos=True, **more) for at, more in enumerate(fields)
    ]
    with Served(tmp_path / "a", Pseudo(num_blocks=200)) as roomy:
        expected = [(tokens(e), tokens(e, 1), logprobs(e), text(e)) for e in map(roomy.generate, messages)]
    with Served(tmp_path / "b", num_blocks=14) as tight:
        calls = [tight.stub.Generate(message, timeout=60) for message in messages]
        streams = [list(call) for call in calls]
        assert tight.stats().values["preemptions_total"] > 0
        tight.wait_idle()
    assert [(tokens(e), tokens(e, 1), logprobs(e), text(e)) for e in streams] == expected
    assert all(usage(events).prompt_tokens == 20 for events in streams)


def test_a_cache_hit_is_counted_and_changes_nothing(served):
    prompt = [77] * 40
    first, second = (served.generate(prompt=prompt, seed=1, max_tokens=6, ignore_eos=True) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert usage(first).cached_tokens == 0 and usage(second).cached_tokens >= 32


def test_a_row_with_nan_ends_its_request_alone(tmp_path):
    model = Pseudo()
    model.poisoned = {(66,): 3}
    with Served(tmp_path, model) as served:
        healthy = served.stub.Generate(request(max_tokens=20, temperature=0, ignore_eos=True), timeout=20)
        events = []
        with pytest.raises(Exception) as error:
            for event in served.stub.Generate(request([66], n=2, max_tokens=20, ignore_eos=True), timeout=20):
                events.append(event)
        assert error.value.code().name == "INTERNAL" and "NaN" in error.value.details()
        assert tokens(list(healthy)) == greedy([1, 2, 3], 20)
        served.wait_idle()


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (
            lambda m: m.setattr(Choice, "has_news", lambda self: bool(self.token_ids)),
            test_prompt_scores_do_not_depend_on_cache_or_chunks,
        ),
        (lambda m: m.setattr(Stream, "usage", lambda self: pb.Usage()), test_max_tokens_is_exact),
        (
            lambda m: m.setattr(streams, "_add_alternatives", lambda *_: None),
            test_logprobs_absent_zero_and_k,
        ),
    ],
    ids=["end without tokens is not told", "no usage", "alternatives dropped"],
)
def test_broken_streams_do_not_pass(served, mutate, test, monkeypatch):
    mutate(monkeypatch)
    arguments = {"count": 5, "length": 3} if test is not test_logprobs_absent_zero_and_k else {}
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    monkeypatch.setattr(Served, "generate", lambda self, message=None, **f: list(
        self.stub.Generate(message or request(**f), timeout=2)
    ))  # fmt: skip
    with pytest.raises(Exception):  # noqa: B017
        test(served, **{name: value for name, value in arguments.items() if name in names})
