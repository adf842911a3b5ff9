"""How the services may be set up. Nothing that a deployment can choose may change a bit, which is what is tried.

A deployment is compared with the plainest one of its model and dtype: one worker, one thread, one step at a time, a
pool that is never full, no prefix cache, prompts in one piece.
"""

import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.crowd.embedded import EmbeddedDriver
from tests.cluster import Cluster

AMPLE_BLOCKS = 4096


@dataclass(frozen=True)
class Deployment:
    """Values of the axes; each but family and dtype is a choice of the operator."""

    family: str
    dtype: str
    tp: int = 1
    threads: int = 1
    chunk: int = 1024  # --max-batch-tokens
    blocks: int = AMPLE_BLOCKS
    block_size: int = 16
    depth: int = 1
    sample_at: str = "worker"
    prefix_cache: bool = False
    place: str = "services"  # or one process
    deaths: bool = False  # a worker is killed in the middle of a crowd
    numerics: str = "invariant"
    device: str = "cpu"
    graphs: bool = True  # of the GPU
    tp_invariant: bool = False  # of a GPU's products
    gpus: int = 1  # that ranks take in turn

    def start(self, model_dir: Path, max_len: int) -> Cluster | EmbeddedDriver:
        """Not yet entered."""
        shared: dict[str, Any] = {
            "dtype": self.dtype,
            "threads": self.threads,
            "numerics": self.numerics,
            "max_batch_tokens": self.chunk,
            "kv_blocks": self.blocks,
            "block_size": self.block_size,
            "pipeline_depth": self.depth,
            "sample_at": self.sample_at,
            "max_seq_len": max_len,
            "max_num_seqs": 128,
        }
        if self.device != "cpu":
            shared["device"] = self.device
        if self.tp_invariant:
            shared["tp_invariant"] = True
        if self.device == "cuda" and self.tp > 1:
            shared["devices"] = ",".join(str(rank % self.gpus) for rank in range(self.tp))
        if self.place == "one process":
            return EmbeddedDriver({"model": str(model_dir), "prefix_cache": self.prefix_cache} | shared)
        if not self.graphs:
            shared["no_cuda_graphs"] = True
        if not self.prefix_cache:
            shared["no_prefix_cache"] = True
        if self.blocks < AMPLE_BLOCKS:
            shared["no_forecast"] = True  # the wish is to see preemptions, not to avoid them
        return Cluster(model_dir, self.tp, ready_timeout_s=180, log_level="warning", **shared)

    def __str__(self) -> str:
        plain = asdict(Deployment(self.family, self.dtype))
        changed = [f"{k}={v}" for k, v in asdict(self).items() if v != plain[k]]
        return " ".join([self.family, self.dtype, *changed])


# The axes that a deployment draws, beside the value that it has in the plainest one.
OPERATOR_AXES = (
    "tp",
    "threads",
    "chunk",
    "blocks",
    "block_size",
    "depth",
    "sample_at",
    "prefix_cache",
    "place",
    "deaths",
)
# The axes of a deployment on a GPU, where threads do not matter; tp comes instead of `place` if asked for. Where
# rows are sampled is a part of the fingerprint: the device computes logprobs in fp32, the host in fp64.
CUDA_AXES = ("chunk", "blocks", "block_size", "depth", "prefix_cache", "place", "deaths", "graphs")


def draw(rng: random.Random, plain: Deployment, tps: tuple[int, ...], max_len: int, missing: set[str]) -> Deployment:
    """A deployment of the same model and dtype; axes in `missing` (not tried yet) are moved for certain."""

    def value(axis: str, *values: Any) -> Any:
        others = [v for v in values if v != getattr(plain, axis)]
        return (
            rng.choice(others)
            if others and (axis in missing or rng.random() < (0.3 if axis == "place" else 0.65))
            else getattr(plain, axis)
        )

    on_gpu = plain.device != "cpu"
    at = plain.sample_at if on_gpu else value("sample_at", "scheduler")
    if "depth" in missing and "sample_at" in missing:
        at = "worker"  # sampling at the scheduler has depth 1: one of the two at a time
    # The first deployment of a run tries what needs services; the one beside it may be one process.
    alone = "deaths" not in missing and not plain.tp_invariant
    place = value("place", "one process") if alone else plain.place
    block_size = value("block_size", *((32, 64) if on_gpu else (8, 32)))
    fewest = -(-max_len // block_size)
    return replace(
        plain,
        tp=value("tp", *(tps[:1] if "tp" in missing else tps)) if place == plain.place else 1,
        threads=plain.threads if on_gpu else value("threads", 2),
        graphs=value("graphs", False) if on_gpu and place == plain.place else True,
        # three rows at a time never fill a pool
        chunk=value("chunk", *((49, 64, 129) if "blocks" in missing else (3, 16, 49, 64, 64, 129))),
        blocks=value("blocks", fewest, fewest + 5, 2 * fewest),
        block_size=block_size,
        depth=1 if at == "scheduler" else value("depth", 2, 4),
        sample_at=at,
        prefix_cache=value("prefix_cache", True),
        place=place,
        deaths=place == plain.place and ("deaths" in missing or rng.random() < 0.2),
    )
