"""Greedy rows are drawn without gathering a row: the same tokens, logprobs and failures for fewer bytes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.step import GroupConfig, Row, RowSampling, StepBatch, int32s
from scheduler_svc.core.request import Request
from tests.sampling import small_engine
from tests.sampling.small_engine import SmallEngine, count_differing
from tests.tiny_models import make_tiny
from worker_svc import drawing, vocabulary_scores
from worker_svc.sampling import SamplerRow, fold_largest, sample, shard_largest

VOCAB, POISON = 3000, 300
EQUAL = (5, 2500)  # ids with one logit, the largest, on different ranks; so have the two ids that follow these

GREEDY = RowSampling(temperature=0.0)
KINDS = ("plain", "scored", "mixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of ids, of opposite sign, share the largest logits; one token turns everything after it into NaN."""
    made = make_tiny(tmp_path_factory.mktemp("tiny") / "llama", vocab_size=VOCAB)
    tensors = load_file(made / "model.safetensors")
    head = tensors["lm_head.weight"]
    for first in EQUAL:
        head[first], head[first + 1] = 40 * head[100], -40 * head[100]
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[int, SmallEngine]:
    return {tp: SmallEngine(folder, tp) for tp in (1, 2, 4)}


def requests(kind: str) -> list[Request]:
    """Greedy ones; `scored`: some with logprobs; `mixed`: beside sampled, penalised and curious ones too."""
    kinds = [GREEDY]
    if kind != "plain":
        kinds.append(RowSampling(temperature=0.0, logprobs=0))
    if kind == "mixed":
        kinds += [
            RowSampling(temperature=0.9, logprobs=2),
            RowSampling(temperature=0.0, logprobs=3),
            RowSampling(temperature=0.0, repetition_penalty=1.3, logprobs=0),
            RowSampling(temperature=0.0, bias_ids=int32s(7), bias_values=np.array([9], np.float32)),
        ]
    rng = np.random.default_rng(3)
    prompts = [np.delete(np.arange(VOCAB), POISON)[rng.integers(0, VOCAB - 1, n)].astype(np.int32) for n in range(1, 9)]
    return [
        Request(key, f"r{key}", prompt, kinds[key % len(kinds)], seed=key, max_tokens=6)
        for key, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_have_the_bits_of_one_rank(engines: dict[int, SmallEngine], kind: str, tp: int) -> None:
    asked = requests(kind)
    told = engines[1].run(asked)
    assert count_differing(told, engines[tp].run(asked)) == 0
    plain = [request.key for request in asked if request.sampling is GREEDY]
    chosen = {int(np.frombuffer(words[:4], np.int32)[0]) for key in plain for words in told[key, 0]}
    assert chosen & {EQUAL[0], EQUAL[0] + 1} and not chosen & {EQUAL[1], EQUAL[1] + 1}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_gathered_rows(
    engines: dict[int, SmallEngine], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(kind)
    told = engines[2].run(asked)
    monkeypatch.setattr(drawing, "needs_no_row", lambda row: False)
    assert count_differing(told, engines[2].run(asked)) == 0


def test_a_fold_that_prefers_the_last_rank_shows(
    engines: dict[int, SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_scores, "fold_largest", lambda ids, logits: fold_largest(ids[::-1], logits[::-1]))
    asked = requests("plain")
    assert count_differing(engines[1].run(asked), engines[2].run(asked)) > 0


@pytest.mark.parametrize("logprobs", (None, 0))
def test_a_row_with_nan_fails_alone(folder: Path, engines: dict[int, SmallEngine], logprobs: int | None) -> None:
    """Both ranks fail the same slot; the row beside it is drawn."""
    greedy = RowSampling(temperature=0.0, logprobs=logprobs)
    prompts = {1: int32s(1, POISON), 3: int32s(1, 2, 3)}
    rows = tuple(
        Row(slot, f"r{slot}", ids, len(ids), 0, int32s(slot), 0, sampling=greedy) for slot, ids in prompts.items()
    )
    batch = StepBatch(1, 0, rows=rows, slots=int32s(1, 3), num_new=int32s(2, 3))
    results = [result for result, _ in step(engines[2], batch)]
    (alone,) = [result for result, _ in step(engines[1], batch)]
    for result in results:
        assert result.failed_slots.tolist() == [1]
        assert result.token_ids.tolist() == alone.token_ids.tolist() and result.token_ids[0] == -1
        assert result.logprobs.tobytes() == alone.logprobs.tobytes() and result.logprobs[0] == 0


@pytest.mark.parametrize(
    ("sampling", "numbers"),
    (
        (RowSampling(temperature=0.0), 2),
        (RowSampling(temperature=0.0, logprobs=0), 2 * 2 + 1 + 2),  # of two blocks on the wider rank, target, largest
        (RowSampling(temperature=0.0, logprobs=1), None),
        (RowSampling(temperature=0.7), None),
    ),
)
def test_a_greedy_row_costs_a_few_numbers(
    engines: dict[int, SmallEngine], sampling: RowSampling, numbers: int | None
) -> None:
    """Bytes that a rank gives away for the draw of three rows: numbers in fp64, or its columns in fp32."""
    prompt = int32s(1, 2, 3)
    rows = tuple(Row(slot, f"r{slot}", prompt, 3, 0, int32s(slot), 0, sampling=sampling) for slot in range(3))
    batch = StepBatch(1, 0, rows=rows, slots=int32s(0, 1, 2), num_new=int32s(3, 3, 3))
    for _, gathered in step(engines[2], batch):
        assert gathered[-1] == 3 * (numbers * 8 if numbers else (VOCAB - 1024) * 4)
        assert all(size != gathered[-1] for size in gathered[:-1])


def step(engine: SmallEngine, batch: StepBatch) -> list[tuple]:
    """(result, bytes given to each all-gather in order) of each rank."""
    shared, barrier = [None] * engine.tp, threading.Barrier(engine.tp)

    class Counted(small_engine.ThreadGroup):
        def __init__(self, rank: int) -> None:
            super().__init__(rank, engine.tp, shared, barrier)
            self.sizes: list[int] = []

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            self.sizes.append(x.numel() * x.element_size())
            return super().all_gather(x)

    def run(rank: int) -> tuple:
        group, runner = Counted(rank), engine.runners[rank]
        runner.join(GroupConfig(1, num_blocks=8, max_num_seqs=4, max_seq_len=64), group)
        return runner.launch(batch).result(), group.sizes

    with ThreadPoolExecutor(engine.tp) as pool:
        return list(pool.map(run, range(engine.tp)))


# --- the arithmetic ------------------------------------------------------------------------------------------------


def tables() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(5)
    for vocab in (1, 5, 99, 100, 1024, 1025, 3000, 5000):
        for dtype in (np.float32, np.float64):
            table = rng.normal(size=(12, vocab)).astype(dtype).round(1)  # many equal ones
            table[1] = -np.inf
            table[2, rng.integers(vocab)] = np.nan
            table[3, rng.integers(vocab)] = np.inf
            table[4] = 0.0
            table[5, : vocab // 2] = -np.inf
            table[6] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
            table[7] = np.nan
            yield table


def test_the_largest_of_shards_is_what_the_sampler_draws() -> None:
    """NaN, infinities, zeros of both signs, equal logits; more shards than blocks."""
    for table in tables():
        blank = Row(0, "r", int32s(1), 1, 0, int32s(0), 0, sampling=RowSampling(temperature=0.0))
        expected = sample(table, [SamplerRow(blank)] * len(table)).token_ids
        blocks = -(-table.shape[1] // 1024)
        for tp in (1, 2, 3, 4, 8):
            edges = [min(1024 * (blocks * rank // tp), table.shape[1]) for rank in range(tp)] + [table.shape[1]]
            ids, logits = zip(*(shard_largest(table[:, a:b], a) for a, b in pairwise(edges)))
            assert fold_largest(np.stack(ids), np.stack(logits)).tolist() == expected.tolist(), (table.shape, tp)
