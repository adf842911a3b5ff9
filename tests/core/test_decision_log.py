"""A core that is asked the same questions decides the same, and the tool says where one that does not first differs."""

import base64
import json
import zlib

import numpy as np
import pytest

from scheduler_svc.core import snapshot
from scheduler_svc.core.decision_log import OWN_STATE, SUFFIX, Difference, Lines, RecordedScheduler, main, replay
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.decision_files import FILES, DecisionFiles
from tests.core.engine import Bench
from tests.core.test_histories import one_event, random_bench


def record(seed: int, log, events: int = 150) -> None:
    rng = np.random.default_rng(seed)
    bench = random_bench(rng, scheduler=lambda config: RecordedScheduler(config, log))
    for _ in range(events):
        one_event(bench, rng)
    bench.run()


def recorded_history(seed: int) -> list[str]:
    lines = Lines()
    record(seed, lines)
    return lines


@pytest.mark.parametrize("seed", range(10))
def test_the_same_log_gives_the_same_decisions(seed):
    lines = recorded_history(seed)
    assert replay(lines) == len(lines) - 1 > 50


class Parts(list[list[str]]):
    """A log that begins anew every few calls."""

    def begin(self, header):
        self.append([header])

    def write(self, line):
        self[-1].append(line)
        return len(self[-1]) > 7


@pytest.mark.parametrize("seed", range(10))
def test_each_part_of_a_log_can_be_replayed_alone(seed):
    """A part begins with the core as it was: with steps in flight, blocks in the cache, rows half way."""
    parts = Parts()
    record(seed, parts)
    assert len(parts) > 20
    assert [replay(part) for part in parts] == [len(part) - 1 for part in parts]
    headers = [json.dumps({"config": json.loads(part[0])["config"]}) for part in parts]
    stateless = [replay([header, *part[1:]]) for header, part in zip(headers, parts)]
    assert any(isinstance(outcome, Difference) for outcome in stateless), "the state matters"


def test_the_folder_stays_within_its_bound_and_each_file_is_replayed(tmp_path, capsys):
    for seed in (1, 2):  # the second run goes on in the same folder
        record(seed, DecisionFiles(tmp_path, 400_000), events=600)
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES and files[0].stem > "0000000001"
    assert sum(file.stat().st_size for file in files) <= 1.25 * 400_000
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"decisions in {FILES} files agree\n")


def test_a_snapshot_makes_nothing_but_parts_of_a_core():
    core = RecordedScheduler(Bench().config, Lines())
    text = snapshot.take(core, OWN_STATE)
    snapshot.restore(core, text)
    core.check_invariants()
    for bad in (b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\ngetattr\n.", b"cscheduler_svc.core.decision_log\nmain\n."):
        with pytest.raises(ValueError, match="has no place in a snapshot"):
            snapshot.restore(core, base64.b64encode(zlib.compress(bad)).decode())
    with pytest.raises(ValueError, match="no snapshot"):
        snapshot.restore(core, base64.b64encode(b"torn").decode())


def test_the_tool_prints_the_first_difference(tmp_path, capsys):
    lines = Lines()
    bench = Bench(scheduler=lambda config: RecordedScheduler(config, lines))
    for _ in range(3):
        bench.submit(6, max_tokens=4)
    bench.run()
    log = tmp_path / f"1{SUFFIX}"
    log.write_text("\n".join(lines))
    assert main([str(log)]) == 0
    assert capsys.readouterr().out == f"{len(lines) - 1} decisions in 1 files agree\n"
    where = next(i for i, line in enumerate(lines) if '"call": "plan"' in line)
    lines[where] = lines[where].replace('"num_prompt": 6', '"num_prompt": 7', 1)
    log.write_text("\n".join(lines))
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out == f"{log.name}, line {where + 1}: plan differs in rows[0].num_prompt\n  recorded 7\n  replayed 6\n"


def test_another_policy_is_seen(monkeypatch):
    lines = recorded_history(3)
    push = WaitingQueue._enqueue

    def newest_first(self, sequence):
        sequence.arrival = -sequence.arrival
        push(self, sequence)

    monkeypatch.setattr(WaitingQueue, "_enqueue", newest_first)
    assert isinstance(replay(lines), Difference)
