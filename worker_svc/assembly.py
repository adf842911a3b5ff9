"""How the parts of a worker are put together for a device: check, load, meet the other ranks.

Knows which runner and which group belong to which device, and what a rank tells about itself. Does not serve: the
worker service and the embedded engine both start here.
"""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from protos.step import Description, GroupConfig, Row, RowSampling, StepBatch, int32s
from worker_svc.config import WorkerConfig
from worker_svc.engine import LocalExecutor
from worker_svc.fingerprint import Fingerprint, cpu_isa, model_hash, numerics_part
from worker_svc.kv_cache import kv_bytes_per_token
from worker_svc.loading.snapshot import Snapshot
from worker_svc.models.load import CheckedSnapshot, check_snapshot, load_model, resolve_dtype
from worker_svc.ops.invariance import NotInvariant, probe
from worker_svc.parallel.group import GlooGroup, Group, SingleGroup, host_store, join_store
from worker_svc.runner import Runner
from worker_svc.sampling import warm_up
from worker_svc.service import Rendezvous
from worker_svc.spec import ModelRefused, ModelSpec, Shard, read_json

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30  # for all ranks of a host together, where nobody says otherwise
CPU_KV_SHARE = 0.25  # and never more than this share of what is free


class Refused(ValueError):
    """This worker cannot be started as asked; the message says why."""


def check(config: WorkerConfig) -> None:
    """What headers, index and devices alone can tell. Raises Refused."""
    try:
        checked = check_snapshot(config.model, config.tp, weights=config.random_weights is None)
        resolve_dtype(config.dtype or "auto", checked.spec)
    except ModelRefused as refusal:
        raise Refused(f"{config.model}: {refusal}") from refusal
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise Refused(f"--device {config.device}: torch {torch.__version__} sees no CUDA device here")


def load_executor(config: WorkerConfig) -> LocalExecutor:
    """The engine of one rank, its weights loaded. Raises Refused."""
    torch.set_num_threads(config.threads)
    try:
        return LocalExecutor(_load_runner(config))
    except (ModelRefused, NotInvariant) as refusal:
        raise Refused(f"{config.model}: {refusal}") from refusal


def _load_runner(config: WorkerConfig) -> Runner:
    checked = check_snapshot(config.model, config.tp, weights=config.random_weights is None)
    dtype = resolve_dtype(config.dtype or "auto", checked.spec)
    started = time.monotonic()
    model = load_model(
        config.model,
        rank=config.rank,
        tp=config.tp,
        dtype=dtype,
        numerics=config.numerics,
        tp_invariant=config.tp_invariant,
        device=config.device,
        random_weights=config.random_weights,
    )
    logger.info("weights in %.1f s", time.monotonic() - started)
    if config.device.startswith("cuda"):
        if config.kv_dtype not in (None, str(dtype).removeprefix("torch.")):
            raise ModelRefused([f"kv dtype {config.kv_dtype} under a model in {dtype} is not supported on cuda"])
        from worker_svc.cuda.runner import load_cuda_runner  # Triton is not there on a machine without a GPU

        runner: Runner = load_cuda_runner(config, checked, model)
        return runner
    from worker_svc.cpu_runner import CpuRunner

    warm_up()
    memory = config.kv_memory_bytes or cpu_kv_bytes() // config.tp
    runner = CpuRunner(model, describe(config, checked, dtype, memory, _cpu_fingerprint(config, checked, dtype)))
    _run_once(runner, Shard(config.rank, config.tp))
    return runner


@dataclass(frozen=True, slots=True)
class _Echo(SingleGroup):
    """Peers that say what this rank says: enough to run every path of a step before any peer is there."""

    rank: int
    tp: int

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.tp, *x.shape).contiguous()


def _run_once(runner: Runner, shard: Shard) -> None:
    """A prefill and a decode step, so that what is compiled or allocated at first use is so before READY."""
    runner.join(GroupConfig(epoch=0, num_blocks=2, max_num_seqs=1, max_seq_len=32), _Echo(shard.rank, shard.tp))
    prompt = np.zeros(17, np.int32)
    row = Row(0, "warm-up", prompt, len(prompt), 0, int32s(0, 1), seed=0, sampling=RowSampling(logprobs=1, top_p=0.9))
    runner.launch(StepBatch(0, 0, rows=(row,), slots=int32s(0), num_new=int32s(len(prompt)))).result()
    runner.launch(StepBatch(0, 1)).result()


def describe(
    config: WorkerConfig, checked: CheckedSnapshot, dtype: torch.dtype, memory_bytes: int, fingerprint: Fingerprint
) -> Description:
    """What a rank tells about itself, on any device."""
    spec, shard = checked.spec, Shard(config.rank, config.tp)
    return Description(
        rank=config.rank,
        tp=config.tp,
        model=config.model.resolve().name,
        model_path=str(config.model.resolve()),
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        num_layers=spec.num_layers,
        kv_heads=len(shard.kv_heads(spec.num_kv_heads)),
        head_dim=spec.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=fingerprint.kv_dtype,
        device=config.device,
        memory_bytes=memory_bytes,
        kv_bytes_per_token=kv_bytes_per_token(spec, shard, getattr(torch, fingerprint.kv_dtype).itemsize),
        eos_token_ids=eos_token_ids(checked.snapshot, spec),
        bos_token_id=spec.bos_token_id,
        fingerprint=fingerprint.parts(),
    )


def _cpu_fingerprint(config: WorkerConfig, checked: CheckedSnapshot, dtype: torch.dtype) -> Fingerprint:
    invariant = config.numerics == "invariant"
    chosen = probe(dtype) if invariant else None
    name = str(dtype).removeprefix("torch.")
    return Fingerprint(
        numerics=numerics_part(config.numerics),
        model=model_hash(checked.snapshot),
        device="cpu",
        isa=cpu_isa(),
        arithmetic=str(chosen) if chosen is not None else "library",
        dtype=name,
        kv_dtype=config.kv_dtype or name,
        leaves=str(checked.spec.leaves),
        torch=torch.__version__,
        triton="none",
        threads="any" if invariant else str(config.threads),
        tp="any" if chosen is not None and chosen.across_tp else str(config.tp),
    )


def eos_token_ids(snapshot: Snapshot, spec: ModelSpec) -> tuple[int, ...]:
    """Of config and generation_config together; the tokenizer's own is the front end's to add."""
    path = snapshot.folder / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.exists() else None
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(sorted({*spec.eos_token_ids, *(token for token in more if isinstance(token, int))}))


def cpu_kv_bytes() -> int:
    """Memory for the KV caches of all ranks on this host."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    return min(CPU_KV_BYTES, int(free * CPU_KV_SHARE))


@dataclass(frozen=True, slots=True)
class _Alone:
    """The only rank meets nobody."""

    address: str = ""

    def form(self) -> Group:
        return SingleGroup()


class _OverGloo:
    """One rank's part in forming a gloo group; rank 0 hosts the store on the address that others reach it by."""

    def __init__(self, config: WorkerConfig, host: str, group: GroupConfig, store_address: str) -> None:
        self._config, self._host, self._group = config, host, group
        if config.rank == 0:
            self._store = host_store(host, group.step_timeout_s)
            self.address = f"{host}:{self._store.port}"
        else:
            store_host, _, port = store_address.rpartition(":")
            self._store = join_store(store_host, int(port), group.step_timeout_s)
            self.address = store_address

    def form(self) -> Group:
        group = self._group
        return GlooGroup(self._store, self._config.rank, self._config.tp, group.epoch, group.step_timeout_s, self._host)


def open_rendezvous(config: WorkerConfig, host: str, group: GroupConfig, store_address: str) -> Rendezvous:
    """`host`: how the other ranks reach this one. Raises OSError, RuntimeError or ValueError."""
    if config.tp == 1:
        return _Alone()
    if config.device.startswith("cuda"):
        from worker_svc.cuda.group import open_cuda_rendezvous

        meeting: Rendezvous = open_cuda_rendezvous(config, host, group, store_address)
        return meeting
    return _OverGloo(config, host, group, store_address)
