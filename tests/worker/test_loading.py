"""Loading is total and loud: what does not fit is refused by name before any is computed; a rank reads its share."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import FAMILIES, edit_config, make_tiny
from tests.worker import huggingface, jobs
from tests.worker.driver import Driver
from tests.worker.mutants import MUTANTS
from tests.worker.rank_pool import RankPool
from worker_svc.loading import reading, runs
from worker_svc.loading.snapshot import SnapshotRefused
from worker_svc.models import check_snapshot, load_model
from worker_svc.models.decoder import Decoder
from worker_svc.models.load import NO_OPS
from worker_svc.spec import ModelRefused, Shard

PROMPT = list(range(3, 103))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model", "llama", max_shard_size="200KB")


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 2
    return found


def refusal(folder: Path, tp: int = 1) -> str:
    with pytest.raises(ModelRefused) as caught:
        check_snapshot(folder, tp)
    return str(caught.value)


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_sharded_checkpoint_equals_a_single_file(sharded: Path, tmp_path: Path) -> None:
    single = make_tiny(tmp_path / "single", "llama")
    a, b = (Driver(load_model(folder)).logits(PROMPT) for folder in (sharded, single))
    assert torch.equal(a, b)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = shards(sharded)[1]
    victim.unlink()
    assert victim.name in refusal(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    victim = shards(sharded)[1]
    victim.write_bytes(victim.read_bytes()[:-1024])
    assert victim.name in refusal(sharded) and "truncated" in refusal(sharded)


def test_a_longer_shard_is_named(sharded: Path) -> None:
    victim = shards(sharded)[1]
    victim.write_bytes(victim.read_bytes() + b"\0" * 8)
    assert victim.name in refusal(sharded)


def test_a_pointer_file_is_named_as_one(sharded: Path) -> None:
    victim = shards(sharded)[1]
    victim.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n")
    assert victim.name in refusal(sharded) and "git-lfs pointer" in refusal(sharded)


@pytest.mark.parametrize("length", (0, 1, 2**40, 2**63))
def test_a_wrong_header_length_is_named(length: int, sharded: Path) -> None:
    victim = shards(sharded)[0]
    victim.write_bytes(struct.pack("<Q", length) + victim.read_bytes()[8:])
    assert victim.name in refusal(sharded)


def test_an_empty_file_is_named(sharded: Path) -> None:
    victim = shards(sharded)[2]
    victim.write_bytes(b"")
    assert victim.name in refusal(sharded)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    victim = shards(sharded)[0]
    name = sorted(load_file(victim))[0]
    rewrite(victim, lambda tensors: tensors.pop(name))
    assert name in refusal(sharded) and victim.name in refusal(sharded)


def test_a_tensor_the_index_does_not_know_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = sorted(values["weight_map"])[0]
    del values["weight_map"][name]
    index.write_text(json.dumps(values))
    assert name in refusal(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = next(name for name, file in values["weight_map"].items() if file != shards(sharded)[-1].name)
    values["weight_map"][name] = shards(sharded)[-1].name
    index.write_text(json.dumps(values))
    assert name in refusal(sharded)


def single(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_missing_extra_and_misshaped_tensors_are_all_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()

    rewrite(single(folder), change)
    said = refusal(folder)
    for name in ("model.norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.weight"):
        assert name in said


def test_no_config_and_no_weights_are_refused(tmp_path: Path) -> None:
    assert "not a folder" in refusal(tmp_path / "nowhere")
    assert "config.json" in refusal(tmp_path)
    folder = make_tiny(tmp_path / "model", "llama")
    single(folder).unlink()
    assert "model.safetensors" in refusal(folder)
    assert issubclass(SnapshotRefused, ModelRefused)


@pytest.mark.parametrize("spelling", ("absent", "present", "contradicting"))
def test_tied_heads_in_three_spellings(spelling: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", tie_word_embeddings=True)
    expected = huggingface.logits(huggingface.load(folder), PROMPT)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if spelling == "contradicting":
            tensors["lm_head.weight"][5, 5] += 1

    if spelling != "absent":
        rewrite(single(folder), change)
    if spelling == "contradicting":
        assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)
    else:
        assert (Driver(load_model(folder)).logits(PROMPT) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("source", (torch.bfloat16, torch.float16, torch.float32))
def test_any_source_type_is_cast(source: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", dtype=source)
    expected = huggingface.logits(huggingface.load(folder), PROMPT)
    assert (Driver(load_model(folder, dtype="float32")).logits(PROMPT) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "plain"))
@pytest.mark.parametrize("threads", (1, 3))
@pytest.mark.parametrize("target", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("tp", (1, 2))
def test_pieces_buffers_and_threads_change_no_byte(
    tp: int, target: torch.dtype, threads: int, compiled: bool, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read as it is or cast, short runs and long ones, in huge pages or not, by machine code or Python."""
    if compiled:
        assert runs._compiled() is not None
    else:
        monkeypatch.setattr(runs, "_compiled", lambda: None)
    for name, size in (("PIECE_BYTES", 512), ("BUFFER_BYTES", 96), ("HUGE_BYTES", 10_000)):
        monkeypatch.setattr(reading, name, size)
    whole = {name: tensor for shard in shards(sharded) for name, tensor in load_file(shard).items()}
    checked, before = check_snapshot(sharded, tp), torch.get_num_threads()
    torch.set_num_threads(threads)
    reader = reading.Reader(checked.snapshot, target, torch.device("cpu"))
    try:
        for parameter in Decoder(checked.family, checked.spec, Shard(tp - 1, tp), NO_OPS).parameters():
            parts = [whole[s.name].narrow(s.dim, s.part.start, len(s.part)) for s in parameter.slices]
            assert torch.equal(reader.read(parameter), torch.cat(parts).to(target)), parameter.slices
    finally:
        reader.close()
        torch.set_num_threads(before)


@pytest.mark.parametrize("target", (torch.float32, torch.bfloat16), ids=str)
def test_a_file_that_ends_while_it_is_read_is_named(target: torch.dtype, sharded: Path) -> None:
    checked = check_snapshot(sharded)
    victim = shards(sharded)[1]
    victim.write_bytes(victim.read_bytes()[:-1024])
    reader = reading.Reader(checked.snapshot, target, torch.device("cpu"))
    with pytest.raises(SnapshotRefused, match=victim.name):
        for parameter in Decoder(checked.family, checked.spec, Shard(), NO_OPS).parameters():
            reader.read(parameter)
    reader.close()


# --- configs -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "architecture": (dict(architectures=["GPT2LMHeadModel"]), ("GPT2LMHeadModel", "LlamaForCausalLM")),
    "quantised": (dict(quantization_config=dict(quant_method="gptq", bits=4)), ("gptq",)),
    "activation": (dict(hidden_act="gelu"), ("hidden_act", "gelu")),
    "mlp bias": (dict(mlp_bias=True), ("mlp_bias",)),
    "unknown rope": (dict(rope_parameters=dict(rope_type="spiral", rope_theta=1e4)), ("spiral",)),
    "dynamic rope": (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), ("dynamic",)),
    "two thetas": (dict(rope_theta=5e5), ("rope_theta", "contradicts")),
    "two ropes": (dict(rope_scaling=dict(type="linear", factor=2.0)), ("rope_scaling contradicts", "rope_type")),
    "kv heads": (dict(num_key_value_heads=3), ("num_key_value_heads 3",)),
    "several": (dict(hidden_act="gelu", mlp_bias=True, num_hidden_layers=0), ("hidden_act", "mlp_bias", "num_hidden")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    fields, named = REFUSED[case]
    folder = make_tiny(tmp_path, "llama")
    edit_config(folder, **fields)
    said = refusal(folder)
    for word in named:
        assert word in said


def test_null_fields_mean_absent_ones(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "mistral")
    before = check_snapshot(folder).spec
    config = json.loads((folder / "config.json").read_text())
    config |= dict(sliding_window=None, rope_scaling=None, quantization_config=None, attention_bias=None)
    (folder / "config.json").write_text(json.dumps(config))
    assert check_snapshot(folder).spec == before


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
ROPES: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": YARN,
    "yarn-factor": YARN | dict(attention_factor=1.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_kind_equals_transformers_in_three_spellings(kind: str, tmp_path: Path) -> None:
    theta = 1_000_000.0
    folder = make_tiny(tmp_path, "llama", rope_parameters=ROPES[kind] | dict(rope_theta=theta))
    expected = huggingface.logits(huggingface.load(folder), PROMPT)
    old = {("type" if key == "rope_type" else key): value for key, value in ROPES[kind].items()}
    spellings = (
        {},
        dict(rope_parameters=None, rope_theta=theta, rope_scaling=ROPES[kind]),
        dict(rope_parameters=None, rope_theta=theta, rope_scaling=old),
    )
    for fields in spellings:
        edit_config(folder, **fields)
        got = Driver(load_model(folder)).logits(PROMPT)
        for position in (0, 31, 32, 99):
            assert (got[position] - expected[position]).abs().max() < 1e-4, (fields, position)
    with MUTANTS["ignored_rope_kind"]():
        ignored = Driver(load_model(folder)).logits(PROMPT)
    assert (kind == "default") == bool((ignored - expected).abs().max() < 1e-4)
    edit_config(folder, rope_theta=10_000.0)
    assert (Driver(load_model(folder)).logits(PROMPT) - expected).abs().max() > 1e-2


# --- shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "tp", "named"),
    (
        (dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, intermediate_size=96), 4, "6 attention"),
        (dict(intermediate_size=30), 4, "intermediate_size 30"),
        (dict(), 3, "8 attention heads"),
    ),
)
def test_a_tp_that_divides_nothing_is_refused_with_the_values_that_work(
    fields: dict[str, int], tp: int, named: str, tiny: Callable[..., Path]
) -> None:
    folder = tiny("llama", **fields)
    said = refusal(folder, tp)
    assert named in said and "valid values of tp: 1, 2" in said
    check_snapshot(folder, 2)


def test_experts_do_not_limit_tp(tiny: Callable[..., Path]) -> None:
    """Every rank holds a share of every expert."""
    heads = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=96)
    check_snapshot(tiny("mixtral", **heads), 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_a_rank_reads_its_parameters_bytes_and_no_more(
    family: str, tp: int, tiny: Callable[..., Path], ranks: RankPool
) -> None:
    folder = tiny(family, vocab_size=2100)
    alone = ranks.run(1, jobs.footprint, str(folder), "float32")[0]
    shares = ranks.run(tp, jobs.footprint, str(folder), "float32")
    for share in shares:
        assert share["read"] == share["elements"] * 4
        assert share["kv"] * tp == alone["kv"]
    assert alone["read"] == sum(t.numel() * 4 for t in load_file(single(folder)).values())


@pytest.mark.parametrize("vocab_size", (5, 1024, 1025, 2100, 5000))
def test_vocabulary_shards_are_whole_blocks(vocab_size: int, tiny: Callable[..., Path], ranks: RankPool) -> None:
    """A rank may hold none; the gathered logits are those of one rank."""
    folder = str(tiny("llama", vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    prompt = [0, 4, 3, vocab_size - 1]
    (alone,) = ranks.run(1, jobs.logits, folder, "float32", prompt)
    assert alone.shape == (4, vocab_size)
    for got in ranks.run(4, jobs.logits, folder, "float32", prompt):
        assert np.array_equal(got, alone)
