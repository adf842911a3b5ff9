"""The embedded engine gives what the services give, without a wire."""

import threading

import pytest

from protos import generation_pb2 as pb
from scheduler_svc import Engine
from scheduler_svc.embedded import RequestFailed
from tests.services.pseudo import Pseudo, greedy, ids_of, write_tokenizer
from tests.services.served import Served, logprobs, request, text, tokens

SCRIPTS = {tuple(ids_of("say")): ids_of("hello DEFGHIJ")}
SIZES = dict(max_num_seqs=16, max_batch_tokens=64, max_seq_len=64)


@pytest.fixture
def engine(tmp_path):
    write_tokenizer(tmp_path)
    with Engine(tmp_path, _executor=lambda: Pseudo(tmp_path, scripts=SCRIPTS), **SIZES) as engine:
        yield engine


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0.0),
        dict(seed=3, logprobs=2, n=2),
        dict(seed=4, repetition_penalty=1.2),
        dict(seed=5, logprobs=0),
    ],
)
def test_results_are_those_of_the_service(engine, tmp_path, fields):
    fields = dict(max_tokens=12, ignore_eos=True) | fields
    result = engine.generate([1, 2, 3], **fields)
    with Served(tmp_path, Pseudo(scripts=SCRIPTS)) as served:
        events = served.generate(**fields)
    for index, choice in enumerate(result.choices):
        assert choice.token_ids == tokens(events, index) and choice.text == text(events, index)
        assert choice.logprobs == logprobs(events, index) and choice.finish_reason == "length"
    assert result.fingerprint == events[0].started.fingerprint.digest
    assert result.usage.completion_tokens == 12 * fields.get("n", 1)


def test_text_chat_ids_and_batches_are_prompts(engine):
    settings = dict(temperature=0, max_tokens=5, ignore_eos=True)
    assert engine.generate("abc", **settings).token_ids == greedy(ids_of("abc"), 5)
    chat = [{"role": "user", "content": "hi"}]
    prompt = [256, *ids_of("user\nhi"), 257, 256, *ids_of("assistant\n")]
    assert engine.generate(chat, **settings).token_ids == greedy(prompt, 5)
    batch = engine.generate(["abc", [1, 2], chat], **settings)
    assert [len(one.token_ids) for one in batch] == [5, 5, 5]
    assert batch[1].token_ids == greedy([1, 2], 5)
    assert engine.generate(request([1, 2], **settings)).token_ids == greedy([1, 2], 5)


def test_stops_cut_the_text_and_say_which(engine):
    result = engine.generate("say", stop="DEF", max_tokens=20)
    assert (result.text, result.choices[0].stop_reason) == ("hello ", "DEF")


def test_events_stream_and_leaving_cancels(engine):
    stream = engine.stream("abc", max_tokens=40, ignore_eos=True)
    assert isinstance(next(stream), pb.GenerateEvent)
    stream.close()
    assert engine.generate("abc", max_tokens=1).token_ids
    assert engine.stats()["requests_live"] == 0


def test_a_forgotten_stream_is_cancelled(engine):
    stream = engine.stream("abc", max_tokens=50, ignore_eos=True)
    engine._thread.loop._executor.step_s = 0.02
    next(stream)
    del stream
    assert engine.stats()["requests_live"] == 0


def test_failures_name_field_and_code(engine):
    with pytest.raises(RequestFailed) as error:
        engine.generate("abc", top_p=0.0)
    assert error.value.code == "INVALID_ARGUMENT" and list(error.value.violations) == ["sampling.top_p"]
    with pytest.raises(RequestFailed, match="DEADLINE_EXCEEDED"):
        engine._thread.loop._executor.step_s = 0.05
        engine.generate("abc", max_tokens=40, timeout_ms=60, ignore_eos=True)
    with pytest.raises(TypeError, match="topp"):
        engine.generate("abc", topp=0.5)


def test_many_threads_share_one_engine(engine):
    results = {}

    def run(at):
        results[at] = engine.generate([at], temperature=0, max_tokens=10, ignore_eos=True).token_ids

    threads = [threading.Thread(target=run, args=(at,)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {at: greedy([at], 10) for at in range(12)}


def test_a_model_that_cannot_be_served_is_an_error_with_the_reason(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(RuntimeError, match="513 is above the model's 512 positions"):
        Engine(tmp_path, max_seq_len=513, _executor=lambda: Pseudo(tmp_path))
