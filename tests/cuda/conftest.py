"""Kernel tests run under Triton's interpreter where there is no GPU, in fp32 (bf16 arithmetic is wrong there)."""

import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, hence here
pytest.importorskip("triton")
if not torch.cuda.is_available():
    from tests.cuda.interpreted import hasten

    hasten()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def dtype() -> "torch.dtype":
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32
