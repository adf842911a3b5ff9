"""How fast an idle engine wakes: `python -m bench.wake_bench [--wakes 200] [--json]`.

The real engine loop in a thread of its own over an executor that answers at once. Each time the engine has been idle
for 20 ms a request arrives; the time is from its arrival in the inbox to its first step at the executor (the loop's
thread wakes, accepts, plans). In turn with it a bare thread is woken through a queue of the same kind, which shows what
the machine itself takes: where other work has the cores, both wait for one. Also the CPU time that the idle engine
takes: it sleeps on its inbox.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np

from bench.core_bench import make_request
from protos.step import Description, GroupConfig, StepBatch, StepResult, int32s
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.loop import EngineLoop, Inbox
from scheduler_svc.messages import Close, EngineState, Notice, StateChanged, Stepped, Submit

IDLE_S = 0.02


class OneToken:
    """An Executor for steps of one sampling row; knows when the last one came."""

    def __init__(self) -> None:
        self.stepped_at = 0.0
        self._facts = Description(
            0, 1, "one-token", "", 1000, 4096, 1, 1, 1, "float32", "float32", "cpu", 0, 0, (), None, {}
        )

    def describe(self) -> Description:
        return self._facts

    def join(self, config: GroupConfig) -> int:
        return 100

    def step(self, batch: StepBatch) -> Future[StepResult]:
        self.stepped_at = time.perf_counter()
        future: Future[StepResult] = Future()
        future.set_result(StepResult(batch.epoch, batch.seq, 0, token_ids=int32s(7)))
        return future

    def close(self) -> None:
        pass


class Bare:
    """A thread that does nothing but wake."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[bool] = SimpleQueue()
        self._woken = Event()
        self._woken_at = 0.0
        self._thread = Thread(target=self._run, name="bare")
        self._thread.start()

    def wake_s(self) -> float:
        self._woken.clear()
        begun = time.perf_counter()
        self._inbox.put(True)
        assert self._woken.wait(10)
        return self._woken_at - begun

    def close(self) -> None:
        self._inbox.put(False)
        self._thread.join(10)

    def _run(self) -> None:
        while self._inbox.get():
            self._woken_at = time.perf_counter()
            self._woken.set()


@dataclass
class Wakes:
    wakes: int
    median_ms: float
    p99_ms: float
    most_ms: float
    bare_median_ms: float
    bare_p99_ms: float
    bare_most_ms: float
    idle_cpu_share: float
    load: float  # of the machine when it began


def measure(wakes: int) -> Wakes:
    load = os.getloadavg()[0]
    inbox: Inbox = SimpleQueue()
    serving, ended = Event(), Event()

    def hear(notices: Sequence[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, StateChanged) and notice.state is EngineState.SERVING:
                serving.set()
            elif isinstance(notice, Stepped) and notice.events.finished:
                ended.set()

    executor = OneToken()
    loop = EngineLoop(EngineConfig(num_blocks=100), executor, inbox, hear)
    thread = Thread(target=loop.run, name="engine")
    thread.start()
    assert serving.wait(10)
    bare, times, bare_times = Bare(), [], []
    for key in range(wakes):
        time.sleep(IDLE_S)
        request = make_request(key, 1, 1)
        ended.clear()
        begun = time.perf_counter()
        inbox.put(Submit(request))
        assert ended.wait(10)
        times.append(1e3 * (executor.stepped_at - begun))
        time.sleep(IDLE_S)
        bare_times.append(1e3 * bare.wake_s())
    begun, cpu = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    idle_cpu_share = (time.process_time() - cpu) / (time.perf_counter() - begun)
    inbox.put(Close())
    thread.join(10)
    bare.close()
    figures = [round(float(ms), 3) for column in (times, bare_times) for ms in np.percentile(column, (50, 99, 100))]
    return Wakes(wakes, *figures, round(idle_cpu_share, 5), round(load, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wakes", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    answer = measure(arguments.wakes)
    print(json.dumps(asdict(answer)) if arguments.json else answer)


if __name__ == "__main__":
    main()
