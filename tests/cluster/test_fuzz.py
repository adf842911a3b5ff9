"""Messages of any kind at any RPC harm nobody, and the run that says so notices harm."""

from collections import Counter

import pytest

from bench import fuzz_rpc

pytestmark = pytest.mark.services


def test_nonsense_at_every_rpc_harms_nobody(capsys):
    code = fuzz_rpc.main(["--messages", "250", "--seed", "4"])
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert code == 0 and last.startswith("messages=2") and "differing=0" in last, out
    reached = {line.partition(" ")[0] for line in out.split("statuses: ")[1].splitlines()[0].split(", ")}
    assert reached >= {target.path.rpartition("/")[2] for target in fuzz_rpc.targets()}


class _Stats:
    def __init__(self, **values):
        self.values = {"requests_live": 0, "kv_blocks_held": 0} | values

    def stats(self):
        return self


def test_what_is_left_behind_is_counted():
    held = {"worker-1": (10, 20, 300)}
    assert fuzz_rpc.leaks(held, held, _Stats()) == []
    assert fuzz_rpc.leaks(held, held, _Stats(kv_blocks_held=3)) == ["kv_blocks_held=3"]
    assert fuzz_rpc.leaks(held, {"worker-1": (200, 20, 300)}, _Stats()) != []
    assert fuzz_rpc.leaks(held, {"worker-1": (10, 400, 300)}, _Stats()) != []


@pytest.mark.parametrize(
    "fault, word", [("crash", "crashes=1"), ("differs", "differing=1"), ("unhandled", "unhandled=1")]
)
def test_harm_is_counted(monkeypatch, capsys, fault, word):
    """The mutants: each kind of harm, as the pieces of the run would report it."""
    watched = type("Watched", (), {"crashes": lambda _: int(fault == "crash"), "held": lambda _: {}})
    control = type(
        "Control",
        (),
        dict(start=lambda _: None, stop=lambda _: None, asked=9, differing=int(fault == "differs"), reasons=Counter()),
    )
    monkeypatch.setattr(fuzz_rpc, "Lockstep", lambda _: type("C", (), dict(stats=_serving, close=lambda _: None))())
    monkeypatch.setattr(fuzz_rpc, "Watched", lambda _: watched())
    monkeypatch.setattr(fuzz_rpc, "Control", lambda _: control())
    monkeypatch.setattr(fuzz_rpc, "leaks", lambda *_: [])
    monkeypatch.setattr(fuzz_rpc.time, "sleep", lambda _: None)

    def attack(attack, count, seed):
        attack.sent += count
        if fault == "unhandled" and not attack.unhandled:
            attack.unhandled["/x: Exception calling application"] += 1

    monkeypatch.setattr(fuzz_rpc, "_attack", attack)
    assert fuzz_rpc.run([], "a:1", "b:1", 50, 1) == 1
    assert word in capsys.readouterr().out.splitlines()[-1]


def _serving(_):
    return type("Reply", (), {"state": "serving", "values": {}})()
