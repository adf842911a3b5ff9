"""A core that is asked the same questions decides the same, and the tool says where one that does not first differs."""

import numpy as np
import pytest

from scheduler_svc.core.decision_log import Difference, RecordedScheduler, main, replay
from scheduler_svc.core.queue import WaitingQueue
from tests.core.engine import Bench
from tests.core.test_histories import one_event, random_bench


def recorded_history(seed: int) -> list[str]:
    lines: list[str] = []

    class Recorded(RecordedScheduler):
        def __init__(self, config):
            super().__init__(config, lines.append)

    rng = np.random.default_rng(seed)
    bench = random_bench(rng, scheduler=Recorded)
    for _ in range(150):
        one_event(bench, rng)
    bench.run()
    return lines


@pytest.mark.parametrize("seed", range(10))
def test_the_same_log_gives_the_same_decisions(seed):
    lines = recorded_history(seed)
    assert replay(lines, RecordedScheduler) == len(lines) - 1 > 50


def test_the_tool_prints_the_first_difference(tmp_path, capsys):
    bench_lines: list[str] = []
    bench = Bench(scheduler=lambda config: RecordedScheduler(config, bench_lines.append))
    for _ in range(3):
        bench.submit(6, max_tokens=4)
    bench.run()
    log = tmp_path / "log"
    log.write_text("\n".join(bench_lines))
    assert main([str(log)]) == 0
    assert capsys.readouterr().out == f"{len(bench_lines) - 1} decisions agree\n"
    where = next(i for i, line in enumerate(bench_lines) if '"call": "plan"' in line)
    bench_lines[where] = bench_lines[where].replace('"num_prompt": 6', '"num_prompt": 7', 1)
    log.write_text("\n".join(bench_lines))
    assert main([str(log)]) == 1
    out = capsys.readouterr().out
    assert out == f"line {where + 1}: plan differs in rows[0].num_prompt\n  recorded 7\n  replayed 6\n"


def test_another_policy_is_seen(monkeypatch):
    lines = recorded_history(3)
    push = WaitingQueue._enqueue

    def newest_first(self, sequence):
        sequence.arrival = -sequence.arrival
        push(self, sequence)

    monkeypatch.setattr(WaitingQueue, "_enqueue", newest_first)
    assert any(
        isinstance(replay(recorded_history_lines, RecordedScheduler), Difference) for recorded_history_lines in [lines]
    )
