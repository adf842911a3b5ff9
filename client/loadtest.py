"""A load test: client processes started, fed, watched and their records gathered into one result.

Knows processes and the plan of a run; figures are in records.py, what a process does in drive.py, display and files in
loadtest_command.py. Invariant: every item ends as exactly one record, also when a client process dies.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from client.channel import Tls
from client.drive import SPAWN, Health, Progress, Share, process_main
from client.records import Goal, Record, figures
from client.schedule import due_times, rescaled
from client.workload import Item

STREAMS_A_PROCESS = 128  # what one client process takes without a thought; more get further processes
BUSY_SHARE, LATE_MS = 0.8, 20.0


class LoadTestError(Exception):
    """The run could not be made: no server, no plan, a client process that died."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the items are sent.

    concurrency: closed loop with that many places. rate: open loop, requests a second; inf sends all at once. Neither:
    the workload's own arrivals. processes 0: as many as the load asks for. warmups: first items, sent before and
    forgotten.
    """

    address: str
    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 0
    processes: int = 0
    warmups: int = 0
    timeout_s: float | None = None
    goal: Goal = field(default_factory=Goal)
    token: str | None = None
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class Result:
    records: list[Record]
    figures: dict[str, Any]
    client: dict[str, Any]  # how well the clients themselves kept up
    interrupted: bool = False


Watch = Callable[[float, list[Progress]], None]


def run(items: Sequence[Item], plan: Plan, watch: Watch | None = None) -> Result:
    """Sends every item and waits for all. Raises LoadTestError. Ctrl-C ends the run with what there is."""
    if plan.warmups:
        warm = Plan(plan.address, concurrency=8, token=plan.token, tls=plan.tls, processes=1)
        run([items[index % len(items)] for index in range(plan.warmups)], warm)
    shares = _shares(items, plan)
    counter = SPAWN.Value("q", 0)
    children: list[tuple[Any, Connection]] = []
    try:
        for share in shares:
            ours, theirs = SPAWN.Pipe()
            child = SPAWN.Process(target=process_main, args=(theirs, counter, share), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        return _gather(children, items, plan, watch)
    finally:
        for child, pipe in children:
            pipe.close()
            child.join(timeout=2.0)
            if child.is_alive():
                child.terminate()
                child.join()


def process_count(items: Sequence[Item], plan: Plan) -> int:
    """Client processes for a plan: one for every 128 streams that may be open, at most one a core less one."""
    if plan.processes:
        return plan.processes
    streams = min(plan.concurrency or len(items), len(items))
    spare = max(1, (os.cpu_count() or 2) - 1)
    return max(1, min(spare, math.ceil(streams / STREAMS_A_PROCESS)))


def _shares(items: Sequence[Item], plan: Plan) -> list[Share]:
    name, count = uuid.uuid4().hex[:8], process_count(items, plan)
    addresses = [address.strip() for address in plan.address.split(",")]

    def share(index: int, some: list[Item], due: list[float] | None, places: int) -> Share:
        address = addresses[index % len(addresses)]
        return Share(address, some, due, places, f"{name}-{index}", plan.timeout_s, plan.token, plan.tls)

    if plan.concurrency is not None:
        places = min(plan.concurrency, len(items))
        split = [places // count + (index < places % count) for index in range(count)]
        return [share(index, list(items), None, mine) for index, mine in enumerate(split) if mine]
    if plan.rate is not None and not any(item.arrival_s for item in items):
        due = due_times(len(items), plan.rate, plan.burstiness, plan.seed)
    else:
        due = rescaled([item.arrival_s for item in items], plan.rate)
    return [
        share(index, list(items[index::count]), due[index::count], 0) for index in range(count) if items[index::count]
    ]


def _gather(children: list[tuple[Any, Connection]], items: Sequence[Item], plan: Plan, watch: Watch | None) -> Result:
    for child, pipe in children:
        kind, said = _receive(child, pipe, 60.0)
        if kind != "ready":
            raise LoadTestError(f"no connection to {plan.address} ({said})")
    start = time.monotonic() + 0.05
    for _, pipe in children:
        pipe.send(start)
    records: list[Record] = []
    progress = [Progress() for _ in children]
    health: dict[int, Health] = {}
    number = {pipe: index for index, (_, pipe) in enumerate(children)}
    interrupted = False
    try:
        while len(health) < len(children):
            open_pipes = [pipe for pipe, index in number.items() if index not in health]
            for pipe in (pipe for pipe in wait(open_pipes, timeout=0.2) if isinstance(pipe, Connection)):
                kind, said = _receive(children[number[pipe]][0], pipe, 1.0)
                if kind == "progress":
                    progress[number[pipe]] = said
                elif kind == "records":
                    records.extend(said)
                elif kind == "done":
                    health[number[pipe]] = said
                else:
                    raise LoadTestError(f"a client process failed: {said}")
            if watch is not None:
                watch(time.monotonic() - start, progress)
    except KeyboardInterrupt:
        interrupted = True
    duration = max((record.ended for record in records), default=0.0) or 1e-9
    return Result(records, figures(records, duration, plan.goal), _client(health, plan, items), interrupted)


def _receive(child: Any, pipe: Connection, timeout_s: float) -> tuple[str, Any]:
    try:
        if not pipe.poll(timeout_s):
            return "failed", "no answer in time"
        kind, said = pipe.recv()
        return str(kind), said
    except (EOFError, ConnectionResetError):
        child.join(timeout=1.0)
        return "failed", f"a client process exited with code {child.exitcode}"


def _client(health: dict[int, Health], plan: Plan, items: Sequence[Item]) -> dict[str, Any]:
    lags = sorted(lag for one in health.values() for lag in one.lags_ms)
    found = {
        "processes": process_count(items, plan),
        "cpu_share": max((one.cpu_share for one in health.values()), default=0.0),
        "max_late_send_ms": max((one.late_send_ms for one in health.values()), default=0.0),
        "p99_lag_ms": lags[int(len(lags) * 0.99)] if lags else 0.0,
    }
    found["bottleneck"] = found["cpu_share"] > BUSY_SHARE
    found["starved"] = not found["bottleneck"] and found["p99_lag_ms"] > LATE_MS  # somebody else had its core
    return found


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried."""

    rate: float
    good_share: float
    kept: bool
    result: Result


def find_rate(
    items: Sequence[Item],
    plan: Plan,
    target: float,
    first_rate: float,
    precision: float = 0.05,
    watch: Callable[[Probe], None] | None = None,
    attempt: Callable[[Sequence[Item], Plan], Result] = run,
) -> list[Probe]:
    """Probes for the highest rate at which at least `target` of the requests keep the goal: doubling, then halving.

    The answer is the highest kept rate; the next one that was not kept is within `precision` of it. Load is monotonic
    only on average, so each probe is a whole run of all items.
    """
    if not plan.goal.limits:
        raise LoadTestError("a goal is needed (--goodput ttft:500) to find the rate that keeps it")
    probes: list[Probe] = []

    def keeps(rate: float) -> bool:
        result = attempt(items, replace(plan, rate=rate, concurrency=None))
        share = result.figures["good_share"] or 0.0
        probe = Probe(rate, share, share >= target, result)
        probes.append(probe)
        if watch is not None:
            watch(probe)
        return probe.kept

    low, high = 0.0, first_rate
    while keeps(high):
        low, high = high, high * 2
        if high > first_rate * 2**12:
            raise LoadTestError("every rate keeps the goal; it is too easy to find a limit with these requests")
    while low == 0.0:
        if high < first_rate / 2**10:
            raise LoadTestError("no rate keeps the goal, not even one request at a time")
        if keeps(high / 2):
            low = high / 2
        else:
            high /= 2
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        if keeps(middle):
            low = middle
        else:
            high = middle
    return probes
