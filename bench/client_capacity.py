"""What one load-test client process can take, and how wrong it is at 90 % of that.

    python bench/client_capacity.py [--streams 128] [--seconds 10] [--json FILE]

A server process of ready-made HTTP/2 frames (bench/replay_server.py, a fraction of a core) sends messages of one token.
First as fast as they are taken, three times: messages then arrive many at a time, which costs the client less than
messages on a schedule, so the best of them is an upper bound. Then on schedules from there down, until nearly all that
is due arrives: that rate is the capacity. Then at 90 % of it, the server writing down when it sent each message. The
client's figures are compared with that log; both read the same monotonic clock.

The last line is `capacity=N offered=N arrived=N worst_error=E`, the worst of the means and medians of TPOT, ITL and
E2EL; the exit code is 0 only if it is within 2 % and the client, not the server, was the limit.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.replay_server import Replay
from client.drive import SPAWN
from client.loadtest import Plan, Result, run
from client.records import Record, samples_ms
from client.workload import Item

SHARE = 0.9
BOUND = 0.02
FLOODS = 3
STEPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the upper bound
NEARLY_ALL = 0.98
STEP_SECONDS = 4.0
STATISTICS = {"mean": np.mean, "median": np.median, "p99": lambda values: np.percentile(values, 99)}


def serve(pipe: Any) -> None:
    """The server process: commands in, logs of send times and of CPU time out."""
    server = Replay()
    pipe.send(server.port)
    while True:
        command, value = pipe.recv()
        if command == "gap":
            server.gap = value
            server.log.clear()
            cpu, wall = time.process_time(), time.monotonic()
            pipe.send(None)
        elif command == "log":
            pipe.send((server.log, (time.process_time() - cpu) / (time.monotonic() - wall)))
        else:
            return


def items(streams: int, messages: int) -> list[Item]:
    return [Item(str(index), [1], {"max_tokens": messages}) for index in range(streams)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pipe, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    plan = Plan(f"127.0.0.1:{pipe.recv()}", concurrency=options.streams, processes=1)
    try:
        result = measure(pipe, plan, options.streams, options.seconds)
    finally:
        pipe.send(("end", None))
        server.join(5)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["worst_error"] <= BOUND and result["client_is_the_limit"] else 1


def at(pipe: Any, gap: float, plan: Plan, streams: int, messages: int) -> tuple[Result, dict[str, list[float]], float]:
    """A run with that gap between the messages of a stream; the server's log and its share of a core."""
    pipe.send(("gap", gap))
    pipe.recv()
    result = run(items(streams, messages), plan)
    pipe.send(("log", None))
    log, share = pipe.recv()
    return result, log, share


def measure(pipe: Any, plan: Plan, streams: int, seconds: float, flood_messages: int = 2000) -> dict[str, Any]:
    at(pipe, 0.0, plan, streams, 200)  # warms both up
    floods = []

    def flood() -> None:
        found, _, share = at(pipe, 0.0, plan, streams, flood_messages)
        rate: float = found.figures["output_throughput"]
        floods.append({"messages_per_s": rate, "client_share": found.client["cpu_share"], "server_share": share})
        print(f"as fast as it comes: {rate:,.0f} messages/s", end=", ")
        print(f"the client at {found.client['cpu_share']:.0%} of a core, the server at {share:.0%}")

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {streams} streams")
    for _ in range(FLOODS):
        flood()
    bound = max(one["messages_per_s"] for one in floods)

    def paced_at(rate: float, seconds: float) -> tuple[Result, dict[str, list[float]], float]:
        gap = streams / rate
        return at(pipe, gap, replace(plan, concurrency=streams), streams, max(10, int(seconds / gap)))

    capacity = 0.0
    for step in STEPS:
        found, _, _ = paced_at(step * bound, STEP_SECONDS)
        came: float = found.figures["output_throughput"]
        print(f"{step * bound:,.0f} messages/s due, {came:,.0f} came")
        if came >= NEARLY_ALL * step * bound:
            capacity = step * bound
            break
    assert capacity, "not even the slowest schedule was kept"
    offered = SHARE * capacity
    paced, log, server_share = paced_at(offered, seconds)
    truth = [
        Record(name, sent[0], sent[0], sent[-1], "OK", "", 1, len(sent) - 1, 0, 0.0, sent[1:], [1] * (len(sent) - 1))
        for name, sent in log.items()
    ]
    arrived = paced.figures["output_throughput"]
    print(f"offered {offered:,.0f} messages/s ({SHARE:.0%}), arrived {arrived:,.0f} ({arrived / offered:.1%})")
    mine, theirs = samples_ms(paced.records), samples_ms(truth)
    rows, worst = {}, 0.0
    for name in ("tpot", "itl", "e2el"):
        for statistic, of in STATISTICS.items():
            found, true = float(of(mine[name])), float(of(theirs[name]))
            rows[f"{statistic}_{name}"] = {
                "client_ms": found,
                "server_ms": true,
                "error": (found - true) / max(true, 1e-3),
            }
            worst = max(worst, abs(found / true - 1)) if statistic != "p99" else worst
            print(f"{statistic + ' ' + name:14} client {found:9.3f} ms, server {true:9.3f} ms, {found / true - 1:+.2%}")
    client = paced.client
    verdict = "it says that it is the bottleneck" if client["bottleneck"] else "it sees no bottleneck"
    print(f"the client used {client['cpu_share']:.0%} of a core, timers {client['p99_lag_ms']:.1f} ms late; {verdict}")
    best = max(floods, key=lambda one: one["messages_per_s"])
    is_limit = best["client_share"] > 0.85 and best["server_share"] < 0.5
    if not is_limit:
        print("the client was not the limit: it did not get a core of its own; run this while nobody else needs it")
    print(f"capacity={capacity:.0f} offered={offered:.0f} arrived={arrived:.0f} worst_error={worst:.2%}")
    return {
        "streams": streams,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "floods": floods,
        "client_is_the_limit": is_limit,
        "bound_messages_per_s": bound,
        "capacity_messages_per_s": capacity,
        "offered_messages_per_s": offered,
        "arrived_messages_per_s": arrived,
        "figures": rows,
        "worst_error": worst,
        "client": client,
        "server_share": server_share,
    }


if __name__ == "__main__":
    raise SystemExit(main())
