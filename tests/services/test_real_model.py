"""The public API over the real thing: lockstep-up, a tiny model with real weights, real sampler, real text."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from tests.cluster import Cluster
from tests.services.served import finish, free_port, logprobs, request, text, tokens, usage, wait_until
from tests.services.test_security import certificate
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.services
RICH = [
    dict(temperature=0.0),
    dict(seed=2**64 - 1, logprobs=3),
    dict(seed=4, top_p=0.9, top_k=40, min_p=0.01),
    dict(seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    dict(seed=6, n=3, logprobs=0),
    dict(seed=7, stop=["a", "<3", "é"], min_tokens=4),
    dict(seed=8, logit_bias={65: 5.0, 66: 5.0}, bad_token_ids=[67]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def stub(model):
    with Cluster(model, tp=2, dtype="float32", kv_blocks=64, max_seq_len=256, max_batch_tokens=48) as cluster:
        with grpc.insecure_channel(cluster.address) as channel:
            yield rpc.GenerationStub(channel)


def run(stub, message):
    return list(stub.Generate(message, timeout=60))


def outcome(events, n=1):
    return [(tokens(events, i), text(events, i), logprobs(events, i), finish(events, i).reason) for i in range(n)]


def rich(at, **more):
    return request([60 + at] * (10 + 7 * at), max_tokens=40, ignore_eos=True, **RICH[at], **more)


def test_a_crowd_changes_nothing_and_every_choice_has_its_logprobs(stub):
    alone = [outcome(run(stub, rich(at)), RICH[at].get("n", 1)) for at in range(len(RICH))]
    calls = [stub.Generate(rich(at), timeout=90) for at in reversed(range(len(RICH)))]
    crowd = [outcome(list(call), RICH[at].get("n", 1)) for at, call in zip(reversed(range(len(RICH))), calls)]
    assert crowd[::-1] == alone
    assert stub.Stats(pb.StatsRequest()).values["preemptions_total"] >= 0


def test_scoring_what_was_drawn_gives_the_same_logprobs(stub):
    """Every returned value equals that of the same tokens as a prompt, which another path computes."""
    prompt = [70, 71, 72]
    events = run(
        stub, request(prompt, seed=9, logprobs=0, logprob_mode=pb.LOGPROB_MODE_RAW, max_tokens=30, ignore_eos=True)
    )
    scored = run(stub, request(prompt + tokens(events), prompt_logprobs=0, max_tokens=0))
    scores = [entry.logprob for event in scored for entry in event.prompt_logprobs]
    assert scores[len(prompt) :] == logprobs(events)


def test_resume_goes_on_with_the_same_bits(stub):
    message = rich(3)
    whole = run(stub, message)
    digest = whole[0].started.fingerprint.digest
    for received in (1, len(whole) // 2, len(whole) - 1):
        count = len(tokens(whole[:received]))
        rest = run(stub, rich(3, resume=(5, [tokens(whole)[:count]]), expected_fingerprint=digest))
        assert tokens(rest) == tokens(whole)[count:]
        assert text(whole[:received]) + text(rest) == text(whole)


def test_logits_are_those_that_were_drawn_from(stub):
    events = run(stub, request([80, 81], temperature=0, return_logits=True, logprobs=0, max_tokens=4))
    rows = np.frombuffer(b"".join(event.logits for event in events), events[0].logits_dtype).reshape(
        len(tokens(events)), -1
    )
    assert rows.argmax(1).tolist() == tokens(events)
    z = rows.astype(np.float64)
    z -= z.max(1, keepdims=True)
    expected = (z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(len(rows)), tokens(events)]
    np.testing.assert_allclose(logprobs(events), expected, atol=1e-5)


def test_cancels_give_every_block_back(stub):
    def blocks():
        values = stub.Stats(pb.StatsRequest()).values
        return values["kv_blocks_free"] + values["kv_blocks_cached"], values["requests_running"]

    for at in range(20):
        call = stub.Generate(request([at] * 30, max_tokens=100, ignore_eos=True), timeout=30)
        for _ in range(at % 4):
            next(call)
        call.cancel()
    wait_until(lambda: blocks() == (64, 0))


def test_chat_goes_through_the_models_template(stub):
    events = run(stub, request(chat=[("user", "hello")], max_tokens=4, temperature=0))
    assert usage(events).prompt_tokens == len("user\nhello") + len("assistant\n") + 3


def start(command, **environment):
    return subprocess.Popen(
        [sys.executable, str(Path(sys.executable).parent / command[0]), *map(str, command[1:])],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_scheduler_and_worker_speak_mutual_tls_and_strangers_stay_outside(tmp_path, model):
    for name, authority in (("ca", None), ("worker", "ca"), ("scheduler", "ca"), ("stranger", None)):
        certificate(tmp_path, name, authority)
    ca, worker_port = tmp_path / "ca.crt", free_port()
    worker = ["lockstep-worker", "--model", model, "--listen", f"127.0.0.1:{worker_port}", "--threads", "1"]
    worker += ["--tls-cert", tmp_path / "worker.crt", "--tls-key", tmp_path / "worker.key", "--tls-ca", ca]
    ports = {"stranger": free_port(), "scheduler": free_port()}
    processes = [start(worker)]
    for name, port in ports.items():
        scheduler = ["lockstep-scheduler", "--listen", f"127.0.0.1:{port}", "--workers", f"127.0.0.1:{worker_port}"]
        scheduler += ["--worker-tls-cert", tmp_path / f"{name}.crt", "--worker-tls-key", tmp_path / f"{name}.key"]
        processes.append(start([*scheduler, "--worker-tls-ca", ca]))
    try:
        stubs = {name: rpc.GenerationStub(grpc.insecure_channel(f"127.0.0.1:{port}")) for name, port in ports.items()}

        def state(name):
            try:
                return stubs[name].Stats(pb.StatsRequest(), timeout=5, wait_for_ready=True).state
            except grpc.RpcError:
                return "none"

        wait_until(lambda: state("scheduler") == "serving", 60)
        assert len(tokens(run(stubs["scheduler"], request(max_tokens=3, ignore_eos=True)))) == 3
        assert state("stranger") == "starting"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)
            process.stdout.close()
