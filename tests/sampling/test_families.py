"""Every family, at 1, 2 and 4 ranks: a crowd is told what each request is told alone on one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.invariance import TINY
from tests.sampling.small_engine import SmallEngine, Told, alone, count_differing, draw_requests
from tests.tiny_models import make_tiny
from worker_svc import cpu_runner
from worker_svc.models.registry import FAMILIES
from worker_svc.sampling import SamplerRow

COUNT = 6


def test_the_fuzzer_knows_every_family_at_two_and_four_ranks() -> None:
    """`bench/invariance.py` draws from these; one rank is what it compares with."""
    assert set(TINY) == {family.model_type for family in FAMILIES.values()}
    assert all({2, 4} <= set(tps) for _, tps in TINY.values())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any], Told]]:
    """Snapshot, requests, and what each is told alone on one rank."""
    known: dict[str, tuple[Path, list[Any], Told]] = {}

    def make(family: str) -> tuple[Path, list[Any], Told]:
        if family not in known:
            folder = make_tiny(tmp_path_factory.mktemp("tiny") / family, family, **TINY[family][0])
            engine = SmallEngine(folder)
            requests = draw_requests(COUNT, engine.vocab_size)
            known[family] = folder, requests, alone(engine, requests)
        return known[family]

    return make


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("family", TINY)
def test_a_crowd_changes_nothing(family: str, tp: int, case: Callable[..., Any]) -> None:
    folder, requests, told = case(family)
    engine = SmallEngine(folder, tp)
    assert count_differing(told, engine.run(requests, max_batch_tokens=40, stagger=1, depth=2)) == 0
    assert count_differing(told, engine.run(requests, max_batch_tokens=100, lose_every=7)) == 0


def test_a_row_that_forgets_its_output_shows(case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(SamplerRow):
        def __init__(self, row: Any) -> None:
            super().__init__(row)
            self.num_output = 0

    folder, requests, told = case("mixtral")
    monkeypatch.setattr(cpu_runner, "SamplerRow", Forgetful)
    assert count_differing(told, SmallEngine(folder, 2).run(requests, max_batch_tokens=100, lose_every=7)) > 0
