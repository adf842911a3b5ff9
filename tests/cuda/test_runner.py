"""The CUDA runner draws what the CPU runner draws, through prefill, chunks, decode, retirement and reused slots."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from protos.step import Description, GroupConfig, Row, RowSampling, StepBatch, StepResult, int32s
from tests.cuda.interpreted import replace_cuda
from worker_svc.cpu_runner import CpuRunner
from worker_svc.cuda.ops import CudaOps
from worker_svc.cuda.runner import CudaRunner
from worker_svc.models import load_model
from worker_svc.ops.cpu import CpuOps
from worker_svc.ops.invariance import probe
from worker_svc.parallel.group import SingleGroup
from worker_svc.runner import Runner

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1200,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False,
}  # fmt: skip
GROUP = GroupConfig(epoch=1, block_size=16, num_blocks=40, max_num_seqs=4, max_batch_tokens=48, max_seq_len=256)
FACTS = Description(0, 1, "", "", 1200, 512, 2, 2, 32, "float32", "float32", "", 1 << 20, 4096, (), None, {})


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Runner]]:
    if torch.cuda.is_available():
        pytest.skip("products of fp32 are in tf32 on a GPU; test_bits.py and bench/serve_bench.py are for GPUs")
    folder = tmp_path_factory.mktemp("model")
    write_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        replace_cuda(patch)
        device = torch.device("cpu")
        plain = load_model(folder, random_weights=7, ops=CpuOps(torch.float32, probe(torch.float32)))
        model = load_model(folder, random_weights=7, ops=CudaOps(torch.float32, dependent=False), device=device)
        yield CpuRunner(plain, FACTS), CudaRunner(model, FACTS, device, 1 << 28, graphs=False)


def row(
    slot: int, tokens: int, blocks: list[int], sampling: RowSampling, *, seed: int = 3, scored: int | None = None
) -> Row:
    ids = np.random.default_rng(slot + 10 * tokens).integers(0, 1200, tokens).astype(np.int32)
    return Row(slot, f"r{slot}", ids, tokens, 0, int32s(*blocks), seed, sampling=sampling, prompt_logprobs=scored)


def steps() -> list[StepBatch]:
    """Two rows prefilled (one in chunks) beside decodes, a third introduced, one retired and its slot reused."""
    greedy, warm = RowSampling(temperature=0.0, logprobs=0), RowSampling(temperature=0.8, logprobs=0)
    special = RowSampling(temperature=1.1, top_k=20, top_p=0.9, logprobs=2, repetition_penalty=1.3)
    return [
        StepBatch(1, 0, rows=(row(0, 40, [3, 9, 11], greedy), row(2, 20, [5, 1], warm)),
                  slots=int32s(0, 2), num_new=int32s(20, 20)),
        StepBatch(1, 1, slots=int32s(0), num_new=int32s(20)),
        StepBatch(1, 2),
        StepBatch(1, 3, rows=(row(1, 17, [20, 21], special),), slots=int32s(1), num_new=int32s(17)),
        StepBatch(1, 4),
        StepBatch(1, 5, retired=int32s(0), rows=(row(0, 30, [30, 31, 32], warm, seed=9, scored=1),),
                  slots=int32s(0), num_new=int32s(30)),
        StepBatch(1, 6),
        StepBatch(1, 7, extended_slots=int32s(2), extended_counts=int32s(1), extended_blocks=int32s(33)),
        *(StepBatch(1, seq) for seq in range(8, 10)),
    ]  # fmt: skip


def test_the_cuda_runner_draws_what_the_cpu_runner_draws(runners: tuple[Runner, Runner]) -> None:
    cpu, cuda = runners
    assert cpu.join(GROUP, SingleGroup()) == cuda.join(GROUP, SingleGroup()) == 40
    wanted, got = [], []
    for batch in steps():
        wanted.append(cpu.launch(batch).result())
        got.append(cuda.launch(batch).result())
    for want, have in zip(wanted, got, strict=True):
        assert want.token_ids.tolist() == have.token_ids.tolist(), want.seq
        for column in ("logprobs", "alternative_logprobs", "prompt_logprobs"):
            np.testing.assert_allclose(getattr(have, column), getattr(want, column), atol=2e-4)
        for column in ("alternative_ids", "prompt_alternative_ids", "failed_slots"):
            assert getattr(have, column).tolist() == getattr(want, column).tolist()
    assert len({t for result in wanted for t in result.token_ids.tolist()}) > 10


def test_steps_may_be_launched_before_results_are_seen(runners: tuple[Runner, Runner]) -> None:
    _, cuda = runners
    cuda.join(GROUP, SingleGroup())
    greedy = RowSampling(temperature=0.0)
    first = StepBatch(1, 0, rows=(row(0, 20, [3, 9], greedy),), slots=int32s(0), num_new=int32s(20))
    pending = [cuda.launch(batch) for batch in (first, *(StepBatch(1, seq) for seq in range(1, 4)))]
    ahead: list[StepResult] = [p.result() for p in pending]
    cuda.join(GROUP, SingleGroup())
    one_by_one = [cuda.launch(batch).result() for batch in (first, *(StepBatch(1, seq) for seq in range(1, 4)))]
    assert [r.token_ids.tolist() for r in ahead] == [r.token_ids.tolist() for r in one_by_one]
