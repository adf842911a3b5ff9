"""From a snapshot folder to a rank's loaded model, in two steps: check everything cheap, then read.

Knows the order of checks and the choice of ops. Invariant: what `check_snapshot` accepts, `load_model` can load, short
of a disk that changes under it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from worker_svc.loading.random_weights import RandomReader
from worker_svc.loading.reading import Reader, check_inventory
from worker_svc.loading.snapshot import Snapshot, open_snapshot
from worker_svc.models.decoder import Decoder, Family
from worker_svc.models.registry import family_of
from worker_svc.ops.base import Ops
from worker_svc.spec import Config, ModelRefused, ModelSpec, Shard, read_json

Mode = Literal["invariant", "fast"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
INITIAL_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class CheckedSnapshot:
    snapshot: Snapshot
    family: Family
    spec: ModelSpec


def read_spec(values: dict[str, object]) -> tuple[Family, ModelSpec]:
    """Family and spec of a Hugging Face config. Raises ModelRefused."""
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ModelRefused([f"quantised checkpoint: quantization_config.quant_method {method!r} is not supported"])
    config = Config(values)
    family = family_of(config)
    return family, family.read(config)


def check_snapshot(model_dir: Path | str, tp: int = 1, *, weights: bool = True) -> CheckedSnapshot:
    """Read config, index and headers only. Raises ModelRefused: unsupported, undivided by tp, or damaged.

    Without `weights` the folder needs no checkpoint: they will be random.
    """
    folder = Path(model_dir)
    snapshot = open_snapshot(folder) if weights else Snapshot(folder, read_json(folder / "config.json"), {})
    family, spec = read_spec(snapshot.config)
    spec.check_tp(tp)
    if not weights:
        return CheckedSnapshot(snapshot, family, spec)
    model = Decoder(family, spec, Shard(0, tp), NO_OPS)
    declared = [part for parameter in model.parameters() for part in parameter.slices]
    tied = ("lm_head.weight", "model.embed_tokens.weight") if spec.tied_head else None
    check_inventory(snapshot, declared, tied)
    return CheckedSnapshot(snapshot, family, spec)


def load_model(
    model_dir: Path | str,
    *,
    rank: int = 0,
    tp: int = 1,
    dtype: str | torch.dtype = "auto",
    numerics: Mode = "invariant",
    tp_invariant: bool = False,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    random_weights: int | None = None,
) -> Decoder:
    """Check and load one rank's shard. `dtype` "auto" is the checkpoint's. Raises ModelRefused.

    random_weights: a seed; the weights are drawn on the device instead of read.
    """
    checked = check_snapshot(model_dir, tp, weights=random_weights is None)
    target = torch.device(device)
    wanted = resolve_dtype(dtype, checked.spec)
    ops = ops or make_ops(wanted, numerics, target, checked.spec if tp_invariant else None)
    model = Decoder(checked.family, checked.spec, Shard(rank, tp), ops)
    reader: Reader | RandomReader
    if random_weights is None:
        reader = Reader(checked.snapshot, wanted, target)
    else:
        head = "model.embed_tokens.weight" if checked.spec.tied_head else "lm_head.weight"
        reader = RandomReader(random_weights, wanted, target, head)
    try:
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.bind(ops, reader.read(parameter))
            model.reserve_positions(min(INITIAL_POSITIONS, checked.spec.max_position_embeddings), target)
    finally:
        reader.close()
    model.bytes_read = reader.bytes_read
    return model


def resolve_dtype(dtype: str | torch.dtype, spec: ModelSpec) -> torch.dtype:
    """Raises ModelRefused for a type that is not computed in."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    name = spec.dtype if dtype == "auto" else dtype
    if name == "float16" and dtype == "auto":
        name = "bfloat16"
    if name not in DTYPES:
        raise ModelRefused([f"dtype {name} is not supported, only {', '.join(DTYPES)}"])
    return DTYPES[name]


def make_ops(dtype: torch.dtype, numerics: Mode, device: torch.device, in_leaves: ModelSpec | None = None) -> Ops:
    """in_leaves: on CUDA, sum this model's row-parallel products in leaves. Raises ModelRefused if it cannot."""
    if device.type == "cuda":
        from worker_svc.cuda.leaf_product import can_cut  # Triton is not there on a machine without a GPU
        from worker_svc.cuda.ops import CudaOps

        if in_leaves is not None:
            _check_leaves(in_leaves, numerics, can_cut)
        ops: Ops = CudaOps(dtype, numerics, in_leaves=in_leaves is not None)
        return ops
    from worker_svc.ops.cpu import CpuOps
    from worker_svc.ops.invariance import fastest, probe

    chosen = probe(dtype) if numerics == "invariant" else fastest(dtype)
    if chosen.row_steps == "torch":
        return CpuOps(dtype, chosen)
    from worker_svc.ops.cpu_compiled import CompiledCpuOps

    compiled = CompiledCpuOps(dtype, chosen)
    compiled.warm_up(dtype)
    return compiled


def _check_leaves(spec: ModelSpec, numerics: Mode, can_cut: Callable[[int, int], bool]) -> None:
    found = ["the sums of experts are not cut into leaves on cuda yet"] if spec.moe is not None else []
    if numerics != "invariant":
        found.append(f"numerics {numerics} promises nothing across tp")
    for what, width in (("attention", spec.q_size), ("feed-forward", spec.intermediate_size)):
        if not can_cut(width, spec.leaves):
            found.append(f"the {what} width {width} is not cut into {spec.leaves} leaves on cuda")
    if found:
        raise ModelRefused([f"tp-invariant: {reason}" for reason in found])


NO_OPS: Ops = None  # type: ignore[assignment]  # declaring parameters computes nothing
