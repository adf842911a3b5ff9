"""A short chaos run, and proof that its comparison notices what it should."""

import random

import pytest

from bench import chaos
from bench.traffic import mixed_requests

pytestmark = pytest.mark.services


def test_a_fault_of_each_quick_kind_loses_nothing(capsys):
    kinds = "worker-kill,engine-kill,worker-link-truncate,client-link-cut,client-disconnect,pool-exhaustion"
    assert chaos.main(["--rounds", "6", "--seed", "3", "--kinds", kinds]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "rounds=6 faults=6 recovered=6 lost=0 differing=0"


@pytest.mark.slow
def test_all_kinds_of_fault_lose_nothing():
    assert chaos.main(["--rounds", str(2 * len(chaos.KINDS)), "--seed", "5"]) == 0


class _Deployment:
    client_link = type("Link", (), {"address": "127.0.0.1:1"})()


class _Answers:
    """Rounds whose answers are scripted: the first SETS are the undisturbed ones."""

    def __init__(self, monkeypatch, spoil):
        self._made, self._spoil = 0, spoil
        monkeypatch.setattr(chaos, "Round", self.round)
        monkeypatch.setattr(chaos, "told", lambda answer: answer)
        monkeypatch.setattr(chaos, "settle", lambda client: "")
        monkeypatch.setitem(chaos.KINDS, "worker-kill", lambda deployment, draw: None)

    def round(self, client, requests):
        self._made += 1
        whole = [(0, "", (), (), ())] * len(requests)
        answers = self._spoil(list(whole)) if self._made == chaos.SETS + 2 else whole
        return type("Round", (), {"join": lambda _: answers, "wait_for_tokens": lambda *_: None})()


@pytest.mark.parametrize(
    "spoil, last",
    [
        (lambda answers: answers, "recovered=3 lost=0 differing=0"),
        (lambda answers: [None, *answers[1:]], "recovered=2 lost=1 differing=0"),
        (lambda answers: [(1, *answers[0][1:]), *answers[1:]], "recovered=2 lost=0 differing=1"),
    ],
)
def test_a_lost_or_differing_answer_is_counted(monkeypatch, capsys, spoil, last):
    monkeypatch.setattr(random.Random, "randrange", lambda *_: 0)
    _Answers(monkeypatch, spoil)
    code = chaos.run(_Deployment(), 3, random.Random(1), ["worker-kill"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)
    assert (code == 0) == (last == "recovered=3 lost=0 differing=0")


def test_the_same_seed_asks_the_same():
    assert mixed_requests(4) == mixed_requests(4) != mixed_requests(5)
