"""SmolLM2-135M-Instruct against transformers: real prompts, greedy, on one rank and on three."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.worker import huggingface, jobs
from tests.worker.rank_pool import RankPool
from worker_svc.loading import demo_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "The opposite of cold is",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model.ensure()


def check(folder: Path, ranks: RankPool, count: int, num_tokens: int, tps: tuple[int, ...]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:count]]
    oracle = huggingface.load(folder)
    expected = [huggingface.greedy(oracle, prompt, num_tokens) for prompt in prompts]
    for tp in tps:
        for answer in ranks.run(tp, jobs.greedy, str(folder), "float32", prompts, num_tokens):
            assert answer == expected, tp


def test_two_prompts(folder: Path, ranks: RankPool) -> None:
    check(folder, ranks, 2, 16, (1, 3))


@pytest.mark.slow
def test_eight_prompts(folder: Path, ranks: RankPool) -> None:
    check(folder, ranks, 8, 64, (1, 3))


MEASURE = """
import re, sys, threading, time
import torch
from worker_svc.models.load import load_model, make_ops
def anonymous() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
dtype = getattr(torch, sys.argv[3])
make_ops(dtype, "invariant", torch.device("cpu"))  # the self-test's and the compiler's memory is not loading
before, peak, done = anonymous(), 0, False
def watch() -> None:
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], rank=0, tp=int(sys.argv[2]), dtype=dtype)
done = True
watcher.join()
print(peak - before, model.bytes_read // 2 * dtype.itemsize)
"""


@pytest.mark.parametrize("tp", (1, 3))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_rank_takes_its_shard_and_little_more(folder: Path, dtype: str, tp: int) -> None:
    """Peak anonymous memory while loading, as it is stored or cast, against the shard's bytes and 64 MiB."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(tp), dtype]
    peak, shard = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert 0.9 * shard < peak < shard + (64 << 20)
