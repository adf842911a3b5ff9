"""The client against the real services: what it promises when a scheduler dies in the middle of its streams."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client import Completion, Lockstep, RetryPolicy
from tests.cluster import Cluster
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.services
PATIENT = RetryPolicy(patience_s=90.0)
ASKED: dict[str, Any] = {
    "max_tokens": 120,
    "ignore_eos": True,
    "seed": 11,
    "n": 2,
    "logprobs": 2,
    "presence_penalty": 0.5,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with Cluster(model) as running:
        yield running


def choices(answer: Completion) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.text, one.logprobs, one.alternatives, one.finish) for one in answer.choices]


def test_a_stream_outlives_its_scheduler_with_the_same_bits(cluster: Cluster) -> None:
    with Lockstep(cluster.address, retry=PATIENT) as client:
        undisturbed = client.generate("Once upon a time", **ASKED)
        with client.stream("Once upon a time", **ASKED) as stream:
            for number, _ in enumerate(stream):
                if number == 40:
                    os.kill(cluster.scheduler_pid, signal.SIGKILL)
        assert stream.completion.resumed >= 1
        assert choices(stream.completion) == choices(undisturbed)
        assert stream.completion.usage.completion_tokens == undisturbed.usage.completion_tokens == 240


def test_a_batch_outlives_its_scheduler_with_the_same_bits(cluster: Cluster) -> None:
    prompts = [f"Number {number} is" for number in range(6)]
    asked = {**ASKED, "max_tokens": 60}
    with Lockstep(cluster.address, retry=PATIENT) as client:
        undisturbed = client.batch(prompts, **asked)
        answers: dict[int, Completion] = {}
        count = 0
        for index, news in client.batch_stream(prompts, **asked):
            count += 1
            if count == 60:
                os.kill(cluster.scheduler_pid, signal.SIGKILL)
            if isinstance(news, Completion):
                answers[index] = news
        assert any(answer.resumed for answer in answers.values())
        for index, answer in enumerate(undisturbed):
            assert isinstance(answer, Completion)
            assert choices(answers[index]) == choices(answer)


def test_a_stream_moves_to_a_second_replica(cluster: Cluster, model: Path) -> None:
    with Cluster(model) as second, Lockstep([second.address, cluster.address], retry=PATIENT) as client:
        undisturbed = client.generate("Once upon a time", **ASKED)
        with client.stream("Once upon a time", **ASKED) as stream:
            for number, _ in enumerate(stream):
                if number == 40:
                    second.stop(signals=2)
        assert stream.completion.resumed >= 1 and choices(stream.completion) == choices(undisturbed)


def test_the_command_answers_from_the_real_service(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "client.app", "generate", "--server", cluster.address, "--chat"]
    flags = ["--prompt", "hello", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    first, second = (subprocess.run([*command, *flags], capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0 and first.stdout == second.stdout and first.stdout.strip()


def test_a_load_test_agrees_with_the_servers_counters(cluster: Cluster) -> None:
    from client.loadtest import Plan, run
    from client.workload import folded, random_items

    with Lockstep(cluster.address, retry=PATIENT) as client:
        before = client.stats().values["generation_tokens_total"]
        items, _ = folded(random_items(20, (8, 40), (5, 30), 0, {}), client.info().vocab_size)
        result = run(items, Plan(cluster.address, concurrency=6))
        counted = client.stats().values["generation_tokens_total"] - before
    assert result.figures["failed"] == 0
    assert result.figures["total_output_tokens"] == counted == sum(item.options["max_tokens"] for item in items)
    assert sum(sum(record.counts) for record in result.records) == counted
