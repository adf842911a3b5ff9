"""Which GPU a rank of `lockstep-up` takes, and when a model's products can be cut into leaves on one."""

import pytest
import torch

from scheduler_svc.up import devices_of
from tests.tiny_models import make_tiny
from worker_svc.models.load import load_model
from worker_svc.spec import ModelRefused


def test_ranks_take_a_gpu_each_or_those_they_are_told() -> None:
    assert devices_of("cuda", None, 2) == ["cuda:0", "cuda:1"]
    assert devices_of("cuda", "0,0,1", 3) == ["cuda:0", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(("device", "listed"), [("cuda", "0"), ("cuda", "0,x"), ("cpu", "0,0")])
def test_a_list_that_does_not_fit_ends_the_command(device: str, listed: str) -> None:
    with pytest.raises(SystemExit, match="--devices"):
        devices_of(device, listed, 2)


def test_a_model_that_has_no_leaves_on_a_gpu_is_refused_by_name(tmp_path) -> None:
    pytest.importorskip("triton")
    folder = make_tiny(tmp_path / "olmoe", "olmoe")
    with pytest.raises(ModelRefused, match="experts"):
        load_model(folder, dtype=torch.bfloat16, device="cuda", tp_invariant=True)
