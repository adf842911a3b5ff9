"""Equal fingerprints promise equal bits, so whatever can change a bit changes the fingerprint."""

import json
import shutil
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from scheduler_svc.known_model import digest_of
from worker_svc import fingerprint as module
from worker_svc.config import WorkerConfig
from worker_svc.fingerprint import Fingerprint, cpu_isa, model_hash, numerics_part
from worker_svc.loading.snapshot import open_snapshot

EXAMPLE = Fingerprint(*[f"a {entry.name}" for entry in fields(Fingerprint)])
PROMISED = {  # DESIGN's list; the scheduler adds where sampling happens
    *("numerics", "model", "device", "isa", "arithmetic", "dtype", "kv_dtype", "leaves", "torch", "triton"),
    *("threads", "tp"),
}


@pytest.mark.parametrize("part", sorted(PROMISED))
def test_each_part_changes_the_digest(part):
    assert digest_of(replace(EXAMPLE, **{part: "other"}).parts()) != digest_of(EXAMPLE.parts())


def test_no_part_is_missing():
    assert set(EXAMPLE.parts()) == PROMISED


def test_a_digest_that_forgets_a_part_is_noticed():
    """The mutant of the first test."""

    def forgetful(parts):
        return digest_of({name: value for name, value in parts.items() if name != "tp"})

    assert forgetful(replace(EXAMPLE, tp="other").parts()) == forgetful(EXAMPLE.parts())


def change_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_dtype(folder):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(name, key, value):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return change


CHANGES = {
    "one weight": change_weight,
    "their type": change_dtype,
    "the config": change_json("config.json", "rms_norm_eps", 1e-3),
    "the tokenizer": change_json("tokenizer.json", "truncation", {"max_length": 5}),
    "what ends a sequence": change_json("generation_config.json", "eos_token_id", [1, 2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_hash_of_the_model_sees_a_change_of(tiny, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    original = model_hash(open_snapshot(tiny))
    assert model_hash(open_snapshot(copy)) == original  # the same model elsewhere is the same
    change(copy)
    assert model_hash(open_snapshot(copy)) != original


def test_a_large_tensor_is_read_in_pages_only(tmp_path, tiny, monkeypatch):
    """A fine-tune touches all pages; a hash that reads all bytes of a large checkpoint would cost its load time."""
    monkeypatch.setattr(module, "PAGE", 64)
    monkeypatch.setattr(module, "PAGES", 4)
    read = []
    real = module._pages
    monkeypatch.setattr(module, "_pages", lambda *a: [read.append(len(page)) or page for page in real(*a)])
    model_hash(open_snapshot(tiny))
    assert sum(read) <= 256 * len(open_snapshot(tiny).tensors) and sum(read) > 0


def test_the_facts_of_this_machine_are_named(monkeypatch):
    words = cpu_isa().split()
    assert torch.backends.cpu.get_cpu_capability().split()[0] in words
    monkeypatch.setattr(module, "_cpuinfo", lambda: ["vendor_id : Other", "flags : avx2 amx_bf16"])
    assert cpu_isa().split() != words and "amx_bf16" in cpu_isa()
    assert numerics_part("invariant") != numerics_part("fast")


def test_threads_and_ranks_count_only_where_bits_depend_on_them(tiny):
    from worker_svc.assembly import _cpu_fingerprint
    from worker_svc.models.load import check_snapshot

    checked = check_snapshot(tiny, 1)

    def parts(**options):
        return _cpu_fingerprint(WorkerConfig(tiny, **options), checked, torch.float32)

    assert parts(threads=1) == parts(threads=2) == parts(tp=2, rank=1)
    assert parts(threads=1, numerics="fast") != parts(threads=2, numerics="fast")
    assert parts(numerics="fast") != parts(numerics="fast", tp=2)
