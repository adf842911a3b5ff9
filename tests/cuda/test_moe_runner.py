"""Mixtures, one with norms over all heads and clipped projections, one with a window: both runners draw the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda import test_runner
from tests.cuda.interpreted import replace_cuda
from worker_svc.cpu_runner import CpuRunner
from worker_svc.cuda.ops import CudaOps
from worker_svc.cuda.runner import CudaRunner
from worker_svc.models import load_model
from worker_svc.ops.cpu import CpuOps
from worker_svc.ops.invariance import probe
from worker_svc.parallel.group import SingleGroup

OLMOE = test_runner.CONFIG | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_key_value_heads": 4, "head_dim": None,
    "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": False, "clip_qkv": 0.4,
}  # fmt: skip
QWEN = test_runner.CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = test_runner.CONFIG | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2, "head_dim": None,
    "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 24,
}  # fmt: skip


@pytest.mark.parametrize("config", [OLMOE, QWEN, MIXTRAL], ids=["olmoe", "qwen3_moe", "mixtral"])
def test_the_cuda_runner_draws_what_the_cpu_runner_draws(
    config: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("products of fp32 are in tf32 on a GPU; bench/moe_check.py and bench/serve_bench.py are for GPUs")
    (tmp_path / "config.json").write_text(json.dumps(config))
    replace_cuda(monkeypatch)
    device = torch.device("cpu")
    plain = load_model(tmp_path, random_weights=7, ops=CpuOps(torch.float32, probe(torch.float32)))
    model = load_model(tmp_path, random_weights=7, ops=CudaOps(torch.float32, dependent=False), device=device)
    cpu = CpuRunner(plain, test_runner.FACTS)
    cuda = CudaRunner(model, test_runner.FACTS, device, 1 << 28, graphs=False)
    assert cpu.join(test_runner.GROUP, SingleGroup()) == cuda.join(test_runner.GROUP, SingleGroup())
    for batch in test_runner.steps()[:3]:  # more tokens than NORM_ROWS, a chunk beside a decode, two decodes
        want, got = cpu.launch(batch).result(), cuda.launch(batch).result()
        assert want.token_ids.tolist() == got.token_ids.tolist(), want.seq
        for column in ("logprobs", "alternative_logprobs", "prompt_logprobs"):
            np.testing.assert_allclose(getattr(got, column), getattr(want, column), atol=2e-4)
