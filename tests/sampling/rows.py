"""Short ways to make rows and logits for these tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protos.step import NO_INTS, Row, RowSampling
from worker_svc.sampling import SamplerRow


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def row(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 1,
    choice: int = 0,
    slot: int = 0,
    **kind: Any,
) -> SamplerRow:
    tokens = np.array([*prompt, *output], np.int32)
    return SamplerRow(Row(slot, "test", tokens, len(prompt), 0, NO_INTS, seed, choice, RowSampling(**kind)))


def logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64) * scale).to(dtype)
