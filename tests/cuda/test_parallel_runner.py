"""Steps of several ranks, sums in leaves: the bits of one rank, whatever the number of ranks."""

import functools
import pickle
from pathlib import Path

import pytest
import torch

from protos.step import GroupConfig, RowSampling, StepBatch, int32s
from tests.cuda.interpreted import order_products, replace_cuda
from tests.cuda.ranks import together
from tests.cuda.test_runner import FACTS, row, write_config
from worker_svc.cuda.ops import CudaOps
from worker_svc.cuda.runner import CudaRunner
from worker_svc.cuda.symmetric import Cut
from worker_svc.models import load_model
from worker_svc.parallel.group import Group, SingleGroup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bench/invariance.py --tp is for GPUs")


GROUP = GroupConfig(epoch=1, block_size=16, num_blocks=8, max_num_seqs=2, max_batch_tokens=16, max_seq_len=64)


def steps() -> list[StepBatch]:
    """A prompt in two chunks, the second beside another prompt, then a decode of both."""
    greedy, warm = (
        RowSampling(temperature=0.0, return_logits=True),
        RowSampling(temperature=0.8, top_k=30, logprobs=2, return_logits=True),
    )
    return [
        StepBatch(1, 0, rows=(row(0, 20, [3, 5], greedy),), slots=int32s(0), num_new=int32s(12)),
        StepBatch(1, 1, rows=(row(1, 5, [1], warm),), slots=int32s(0, 1), num_new=int32s(8, 5)),
        StepBatch(1, 2),
    ]


def run_steps(group: Group, device: torch.device, *, folder: Path, in_leaves: bool) -> None:
    """Every result of `steps` on this rank, in a file."""
    with pytest.MonkeyPatch.context() as patch:
        replace_cuda(patch)
        order_products(patch)
        ops = CudaOps(torch.float32, dependent=False, in_leaves=in_leaves)
        model = load_model(folder, rank=group.rank, tp=group.tp, random_weights=7, ops=ops, device=device)
        runner = CudaRunner(model, FACTS, device, 1 << 28, graphs=False)
        runner.join(GROUP, group)
        results = [runner.launch(batch).result() for batch in steps()]
    columns = ("token_ids", "logprobs", "alternative_ids", "alternative_logprobs", "prompt_logprobs")
    bits = [tuple(getattr(result, column).tobytes() for column in columns) for result in results]
    logits = [result.logits.tobytes() for result in results if result.logits is not None]  # of rank 0
    (folder / f"bits-{group.tp}-{group.rank}-{in_leaves}").write_bytes(pickle.dumps((bits, logits)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_config(folder)
    for in_leaves in (True, False):
        run_steps(SingleGroup(), torch.device("cpu"), folder=folder, in_leaves=in_leaves)
    return folder


def of(folder: Path, tp: int, rank: int, in_leaves: bool = True) -> tuple[list[tuple[bytes, ...]], list[bytes]]:
    found: tuple[list[tuple[bytes, ...]], list[bytes]] = pickle.loads(
        (folder / f"bits-{tp}-{rank}-{in_leaves}").read_bytes()
    )
    return found


def test_two_ranks_have_the_bits_of_one(folder: Path) -> None:
    work = functools.partial(run_steps, folder=folder, in_leaves=True)
    together(work, folder, 2, Cut(1 << 20, 1 << 9, 3))
    columns, logits = of(folder, 1, 0)
    assert of(folder, 2, 0) == (columns, logits)
    assert of(folder, 2, 1) == (columns, [])
    assert len(logits) == 2


def test_one_sum_over_all_of_k_would_be_seen(folder: Path) -> None:
    assert of(folder, 1, 0, False)[1] != of(folder, 1, 0)[1]
