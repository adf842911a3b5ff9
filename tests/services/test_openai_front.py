"""The OpenAI front end to end: the public gateway `smg` over our service, spoken to by the real `openai` client."""

import importlib.util
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest

from tests.services.pseudo import Pseudo, V, greedy, ids_of
from tests.services.served import Served, free_port, request, wait_until
from tests.services.test_lifecycle import Process

missing = [name for name in ("smg", "smg_grpc_proto", "openai") if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f"no wheel of {', '.join(missing)} for this platform is installed", allow_module_level=True)

import openai  # noqa: E402
from smg_grpc_proto import vllm_engine_pb2 as vllm  # noqa: E402
from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: E402
from smg_grpc_proto.generated import common_pb2 as common  # noqa: E402

from scheduler_svc import openai_front  # noqa: E402

pytestmark = pytest.mark.services
SAY = {tuple(ids_of("say")): ids_of("hello STOP 😀 and more text")}


class Gateway:
    """`smg` over the addresses of schedulers, nothing of it beyond loopback."""

    def __init__(self, *addresses, policy="round_robin"):
        self.port = free_port()
        command = [str(Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]
        command += ["--worker-urls", *(f"grpc://{address}" for address in addresses), "--policy", policy]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        # it looks for a tokenizer at the worker's path and then asks the network: a closed port of this machine
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)
        wait_until(self._is_ready, 40)
        self.model = self.client.models.list().data[0].id
        return self

    def __exit__(self, *_):
        self.client.close()
        self.process.kill()
        self.process.wait(20)

    def _is_ready(self):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readiness", timeout=2).status != 200:
                return False
            model = self.client.models.list().data[0].id
            self.client.completions.create(model=model, prompt="x", max_tokens=1)
            return True
        except (OSError, IndexError, openai.APIError):
            return False

    def complete(self, prompt="say", **fields):
        return self.client.completions.create(model=self.model, prompt=prompt, **fields)

    def chat(self, **fields):
        messages = [{"role": "user", "content": "hi"}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **fields)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = Pseudo(scripts=SAY, step_s=0.003)
    with Served(tmp_path_factory.mktemp("m"), model, dict(openai=True), max_seq_len=512, max_queue=4) as served:
        yield served


@pytest.fixture(scope="module")
def gateway(served):
    with Gateway(served.address) as gateway:
        yield gateway


def test_completions_say_what_the_service_says(served, gateway):
    answer = gateway.complete(max_tokens=26)
    assert answer.choices[0].text == "hello STOP 😀 and more t" and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 26)


def test_stop_strings_end_the_work_and_not_only_the_text(served, gateway):
    answer = gateway.complete(max_tokens=26, stop=["STOP"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello ", "stop")
    assert answer.usage.completion_tokens == 10


def test_streams_join_to_the_unary_answer_with_its_usage(served, gateway):
    chunks = list(gateway.complete(max_tokens=26, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello STOP 😀 and more t"
    assert len([chunk for chunk in chunks if chunk.choices]) > 5
    assert chunks[-1].usage.completion_tokens == 26


def test_chat_with_logprobs_and_choices(served, gateway):
    prompt = [256, *ids_of("user\nhi"), 257, 256, *ids_of("assistant\n")]
    answer = gateway.chat(max_tokens=1, temperature=0, logprobs=True, top_logprobs=2)
    (entry,) = answer.choices[0].logprobs.content
    assert ids_of(entry.token) == greedy(prompt, 1) and len(entry.top_logprobs) == 2
    assert entry.logprob == entry.top_logprobs[0].logprob < 0
    four = gateway.chat(max_tokens=6, seed=3, n=4)
    assert sorted(choice.index for choice in four.choices) == [0, 1, 2, 3]
    again = gateway.chat(max_tokens=6, seed=3, n=4)
    assert {c.index: c.message.content for c in four.choices} == {c.index: c.message.content for c in again.choices}
    assert len({choice.message.content for choice in four.choices}) == 4


def test_bad_requests_are_400_with_the_reason_and_what_is_not_built_is_501(served, gateway):
    with pytest.raises(openai.BadRequestError, match="max_tokens 100000 are 100003, the context is 512"):
        gateway.complete(max_tokens=100000)
    with pytest.raises(openai.BadRequestError):
        gateway.complete(top_p=0.0)
    with pytest.raises(openai.APIStatusError, match="structured output") as error:
        gateway.chat(response_format={"type": "json_object"})
    assert error.value.status_code == 501
    assert gateway.complete(max_tokens=3).choices[0].text == "hel"


def test_overload_is_429(served, gateway):
    served.model.hold()
    calls = [served.stub.Generate(request(text="x", max_tokens=3), timeout=30) for _ in range(16 + 4)]
    try:
        wait_until(lambda: served.stats().values["requests_live"] == 20)
        with pytest.raises(openai.RateLimitError):
            gateway.complete(max_tokens=3)
    finally:
        served.model.go()
    for call in calls:
        list(call)
    served.wait_idle()


def test_a_client_that_leaves_frees_its_blocks(served, gateway):
    stream = gateway.complete(prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    wait_until(lambda: served.stats().values["requests_running"] == 1)
    stream.close()
    served.wait_idle(5)


def test_two_replicas_and_one_is_killed(tmp_path):
    with Process(tmp_path / "a", 0.002, "--openai") as one, Process(tmp_path / "b", 0.002, "--openai") as two:
        with Gateway(one.address, two.address) as gateway:
            answers, errors = [], []

            def work():
                for at in range(20):
                    try:
                        answers.append(gateway.complete(prompt="x", max_tokens=10, seed=at, n=1).choices[0].text)
                    except openai.APIError as error:
                        errors.append(error)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(answers) > 12)
            one.process.kill()
            for thread in threads:
                thread.join(60)
            # a unary request is the gateway's to retry; what was lost while it noticed is bounded
            assert len(answers) + len(errors) == 60 and len(errors) <= 3, errors
            assert gateway.complete(prompt="x", max_tokens=10, seed=1).choices[0].text in answers


def test_the_service_itself(served):
    """What the gateway polls, and a Generate without streaming, whose last message carries everything."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(served.channel)
    assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
    info = stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("pseudo", 512, V)
    assert info.tokenizer_path == served.model.folder
    server = stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs, server.active_requests) == (16, 16, 0)
    assert stub.GetLoads(vllm.GetLoadsRequest()).loads[0].max_running_requests == 16
    data = b"".join(chunk.data for chunk in stub.GetTokenizer(common.GetTokenizerRequest()))
    assert data == openai_front.bundle(Path(served.model.folder)) and data[:2] == b"PK"
    message = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 2, 3]))
    message.sampling_params.CopyFrom(vllm.SamplingParams(temperature=0, max_tokens=5, n=2, logprobs=2, ignore_eos=True))
    answers = list(stub.Generate(message))
    assert sorted(answer.complete.index for answer in answers) == [0, 1]
    for answer in answers:
        assert list(answer.complete.output_ids) == greedy([1, 2, 3], 5)
        assert len(answer.complete.output_logprobs.top_logprobs) == 5
    message.sampling_params.regex = "a*"
    with pytest.raises(grpc.RpcError, match="structured output"):
        list(stub.Generate(message))
    with pytest.raises(grpc.RpcError) as error:
        stub.Embed(vllm.EmbedRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_zeros_of_their_protocol_are_unset():
    ours = openai_front.translate(vllm.GenerateRequest(sampling_params=vllm.SamplingParams())).sampling
    assert not any(
        ours.HasField(name) for name in ("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "seed")
    )
    theirs = vllm.SamplingParams(temperature=0, max_tokens=0, seed=-1, logit_bias={3: 1.5})
    ours = openai_front.translate(vllm.GenerateRequest(sampling_params=theirs)).sampling
    assert ours.HasField("temperature") and ours.HasField("max_tokens") and ours.seed == 2**64 - 1
    assert dict(ours.logit_bias) == {3: 1.5}


def test_answers_without_their_end_do_not_pass(served, monkeypatch):
    monkeypatch.setattr(openai_front._Answer, "_complete", lambda self, event, whole: vllm.GenerateResponse())
    with pytest.raises(AssertionError):
        test_the_service_itself(served)
