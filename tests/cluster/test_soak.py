"""What the soak says is so: growth is noticed by what grew, and the load is the highest that brings anything."""

import argparse
import time

import pytest

from bench import soak

HELD = {"worker-1": (10, 20, 300)}


@pytest.mark.parametrize(
    "held, grown",
    [
        ((10, 20, 300), []),
        ((14, 28, 350), []),  # pools breathe
        ((15, 20, 300), ["threads"]),
        ((10, 29, 300), ["descriptors"]),
        ((10, 20, 360), ["memory"]),
        ((99, 99, 999), ["descriptors", "memory", "threads"]),
    ],
)
def test_growth_is_told_by_what_grew(held, grown):
    found = soak.growth(HELD, {"worker-1": held})
    assert sorted(what for what, names in found.items() if names == ["worker-1"]) == grown


class _Load:
    """A service that gives so many tokens a second to so many streams."""

    def __init__(self, rates):
        self._rates, self.tokens, self.tried = rates, 0, []

    def start(self, streams, until):
        self.tried.append(streams)
        self.tokens += int(self._rates[streams] * (until - time.monotonic()))
        self._until = until

    def join(self):
        time.sleep(max(0.0, self._until - time.monotonic()))


@pytest.mark.parametrize(
    "rates, found",
    [
        ({8: 1e6, 16: 2e6, 32: 3e6, 64: 3.05e6}, 64),  # no better by 5 %, but no worse
        ({8: 1e6, 16: 2e6, 32: 1.5e6}, 16),  # a load that costs is none that lasts
        ({8: 1e6, 16: 2e6, 32: 4e6, 64: 8e6, 128: 16e6, 256: 32e6}, 256),
    ],
)
def test_the_load_is_the_highest_that_brings_anything(monkeypatch, rates, found):
    monkeypatch.setattr(soak, "PROBE_S", 0.2)
    load = _Load(rates)
    assert soak.highest_load(load) == found and load.tried == list(rates)


@pytest.mark.parametrize("fault", ["", "memory", "blocks", "crash"])
def test_the_last_line_is_the_verdict(monkeypatch, capsys, fault):
    class Watched:
        def __init__(self, _):
            self.reads = 0

        def held(self):
            self.reads += 1
            return {"worker-1": (10, 20, 900 if fault == "memory" and self.reads > 2 else 300)}

        def crashes(self):
            return int(fault == "crash")

    class Client:
        def __init__(self, _):
            pass

        def stats(self):
            return argparse.Namespace(state="serving")

        def complete(self, _):
            time.sleep(0.01)
            return argparse.Namespace(usage=argparse.Namespace(completion_tokens=5))

        def close(self):
            pass

    monkeypatch.setattr(soak, "Watched", Watched)
    monkeypatch.setattr(soak, "Lockstep", Client)
    monkeypatch.setattr(soak, "told", lambda answer: answer.usage.completion_tokens)
    monkeypatch.setattr(soak, "settle", lambda _: "3 blocks held" if fault == "blocks" else "")
    deployment = argparse.Namespace(direct="", keeper=argparse.Namespace(children=[]))
    result = soak.run(deployment, argparse.Namespace(streams=2, minutes=0.02, seed=1, tp=1))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"verdict={'failed' if fault else 'ok'}") and result["requests"] > 10
    for what in ("memory", "threads", "descriptors", "blocks"):
        assert f"{what}={'GROWN' if what == fault else 'ok'}" in last
