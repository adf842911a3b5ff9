"""What ranks are asked to do. Each job runs on every rank of a group and returns plain values."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tests.worker.driver import DrivenRow, Driver
from tests.worker.mutants import MUTANTS
from worker_svc.kv_cache import KVCache
from worker_svc.models import Decoder, load_model
from worker_svc.parallel.group import Group
from worker_svc.vocabulary_scores import greedy_tokens, score_tokens

_loaded: dict[Any, Decoder] = {}


def model(
    rank: int, group: Group, folder: str, dtype: str, numerics: str = "invariant", fresh: bool = False
) -> Decoder:
    key = (folder, dtype, numerics, group.tp)
    if fresh or key not in _loaded:
        loaded = load_model(folder, rank=rank, tp=group.tp, dtype=dtype, numerics=numerics)  # type: ignore[arg-type]
        if fresh:
            return loaded
        if len(_loaded) > 8:
            _loaded.clear()
        _loaded[key] = loaded
    return _loaded[key]


def greedy(
    rank: int,
    group: Group,
    folder: str,
    dtype: str,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    numerics: str = "invariant",
    chunk: int = 10**6,
    mutant: str | None = None,
    kv_dtype: str | None = None,
    threads: int = 1,
) -> list[list[int]]:
    torch.set_num_threads(threads)
    with MUTANTS[mutant]() if mutant else nullcontext():
        loaded = model(rank, group, folder, dtype, numerics, fresh=mutant is not None)
        kind = getattr(torch, kv_dtype) if kv_dtype else None
        return Driver(loaded, group, kv_dtype=kind).greedy(prompts, num_tokens, chunk=chunk)


def logits(
    rank: int,
    group: Group,
    folder: str,
    dtype: str,
    tokens: list[int],
    *,
    chunks: tuple[int, ...] = (),
    numerics: str = "invariant",
    mutant: str | None = None,
    block_size: int = 16,
    kv_dtype: str | None = None,
    threads: int = 1,
) -> np.ndarray:
    torch.set_num_threads(threads)
    with MUTANTS[mutant]() if mutant else nullcontext():
        loaded = model(rank, group, folder, dtype, numerics, fresh=mutant is not None)
        kind = getattr(torch, kv_dtype) if kv_dtype else None
        driver = Driver(loaded, group, num_blocks=16 + 2048 // block_size, block_size=block_size, kv_dtype=kind)
        return driver.logits(tokens, chunks).numpy()


def footprint(rank: int, group: Group, folder: str, dtype: str) -> dict[str, int]:
    """Bytes read, bytes of the rank's parameters in the checkpoint's type, and bytes of a cache of 10 blocks."""
    loaded = model(rank, group, folder, dtype)
    elements = sum(int(np.prod(p.shape)) for p in loaded.parameters())
    cache = KVCache(loaded.spec, 10, 16, dtype=loaded.ops.dtype, shard=loaded.shard)
    return {"read": loaded.bytes_read, "elements": elements, "kv": cache.nbytes}


def scores(
    rank: int, group: Group, folder: str, dtype: str, tokens: list[int], targets: list[int], k: int, ties: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Vocabulary-parallel scores of one row a token, and greedy tokens; with `ties` all logits are equal."""
    loaded = model(rank, group, folder, dtype)
    row = DrivenRow(list(tokens))
    hidden = Driver(loaded, group).step([row], [len(tokens)])
    hidden = torch.zeros_like(hidden) if ties else hidden
    found = score_tokens(loaded, hidden, np.array(targets, np.int32), k, group)
    return (*found, greedy_tokens(loaded, loaded.local_logits(hidden), group))
