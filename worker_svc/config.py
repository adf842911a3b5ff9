"""What a worker is started with; validated once, passed as it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """dtype None is the checkpoint's own. kv_memory_bytes None leaves it to the runner."""

    model: Path
    rank: int = 0
    tp: int = 1
    device: str = "cpu"
    dtype: str | None = None
    kv_dtype: str | None = None  # None: the model's
    numerics: Literal["invariant", "fast"] = "invariant"
    tp_invariant: bool = False  # on CUDA: bits do not depend on tp either; a CPU's never do
    threads: int = 1
    kv_memory_bytes: int | None = None
    cuda_graphs: bool = True  # False launches kernels one by one: the same bits, slowly
    random_weights: int | None = None  # a seed: the model folder needs a config only

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp:
            raise ValueError(f"rank {self.rank} of a group of {self.tp}")
