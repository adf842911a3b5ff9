"""The planner reproduces published figures, and agrees with what is loaded and allocated."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker import jobs
from tests.worker.rank_pool import RankPool
from worker_svc.plan import GIB, Hardware, Plan, make_plan, pool_tokens
from worker_svc.spec import ModelRefused, Shard

QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1000000,
    tie_word_embeddings=False,
    hidden_act="silu",
    attention_bias=False,
    torch_dtype="bfloat16",
)
MISTRAL_7B = dict(
    architectures=["MistralForCausalLM"],
    model_type="mistral",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=32768,
    sliding_window=4096,
    hidden_act="silu",
    torch_dtype="bfloat16",
)


def plan(config: dict[str, object], tp: int = 1, memory_gib: float = 141, **options: float) -> Plan:
    return make_plan(config, Hardware(memory_gib * GIB), tp=tp, **options)  # type: ignore[arg-type]


def test_bytes_of_a_token() -> None:
    assert plan(QWEN3_8B).kv_bytes_per_token == 147_456
    assert plan(MISTRAL_7B).kv_bytes_per_token == 131_072
    assert plan(QWEN3_8B, tp=4).kv_bytes_per_token_rank == 36_864
    assert plan(QWEN3_8B, tp=4).kv_bytes_per_token == 147_456


def test_weights_of_a_rank() -> None:
    assert round(plan(QWEN3_8B).weight_bytes / GIB, 2) == 15.26
    assert round(plan(QWEN3_8B, tp=4).weight_bytes / GIB, 2) == 3.81


def test_tokens_and_sequences_of_a_known_pool() -> None:
    known = plan(QWEN3_8B, tp=4, pool_bytes=15.65 * GIB)
    assert abs(known.pool_tokens / 455_888 - 1) < 5e-4
    assert abs(known.sequences[40_960] - 11.13) < 0.01


def test_replicated_kv_heads_are_counted_on_every_rank() -> None:
    assert plan(QWEN3_8B, tp=8).kv_bytes_per_token_rank == 147_456 // 8
    wide = QWEN3_8B | dict(num_key_value_heads=4)
    assert plan(wide, tp=8).kv_bytes_per_token_rank == plan(wide, tp=4).kv_bytes_per_token_rank


def test_step_times_are_bytes_over_bandwidth() -> None:
    hardware = Hardware(141 * GIB, memory_bandwidth=1e12, link_bandwidth=1e11, link_latency=1e-5)
    alone = make_plan(QWEN3_8B, hardware, context=1000).steps[1]
    read = plan(QWEN3_8B).weight_bytes - 151936 * 4096 * 2
    assert alone.weights_ms == pytest.approx(read / 1e9)
    assert alone.kv_ms == pytest.approx(8 * 1000 * 147_456 / 1e9)
    assert alone.collectives_ms == 0
    assert make_plan(QWEN3_8B, hardware, tp=2).steps[0].collectives_ms > 74 * 0.01
    assert alone.tokens_per_s == pytest.approx(8e3 / alone.total_ms)


def test_a_mixture_reads_the_experts_it_chooses(tiny: Callable[..., Path]) -> None:
    config = json.loads((tiny("qwen3_moe") / "config.json").read_text())
    one, *_, many = plan(config).steps
    assert one.weights_ms < many.weights_ms


def test_no_room_and_bad_divisions_are_refused() -> None:
    with pytest.raises(ModelRefused, match=r"15\.26 GiB"):
        plan(QWEN3_8B, memory_gib=16)
    with pytest.raises(ModelRefused, match="valid values of tp"):
        plan(QWEN3_8B, tp=3)


@pytest.mark.parametrize("tp", (1, 2))
def test_the_plan_equals_what_a_rank_loads_and_allocates(tp: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    folder = tiny("qwen3", vocab_size=2100)
    config = json.loads((folder / "config.json").read_text())
    planned = make_plan(config, Hardware(GIB), tp=tp, dtype="float32")
    real = ranks.run(tp, jobs.footprint, str(folder), "float32")
    assert planned.largest_weight_bytes == max(share["read"] for share in real)
    assert planned.kv_bytes_per_token_rank * 160 == real[0]["kv"]


def test_the_pool_includes_the_null_block(tiny: Callable[..., Path]) -> None:
    from worker_svc.models import check_snapshot

    spec = check_snapshot(tiny("llama")).spec
    token = 2 * 2 * 4 * 8 * 4
    assert pool_tokens(token * 16 * 10, spec, Shard(), 4) == 9 * 16


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_8B))
    command = [sys.executable, "-m", "worker_svc.plan", str(config), "--device-memory", "141", "--tp", "4"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "36,864 B a rank" in text and "3.81 GiB" in text
    values = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert values["kv_bytes_per_token_rank"] == 36_864
    refused = subprocess.run([*command, "--tp", "3"], capture_output=True, text=True, check=False)
    assert refused.returncode and "32 attention heads" in refused.stderr
