"""What one load-test client process can take, and how wrong it is at 90 % of that.

    python bench/client_capacity.py [--streams 64] [--seconds 10] [--json FILE]

A server process sends ready-made messages of one token, first as fast as it can: what arrives is what client and server
can do on this machine, and divided by the share of a core that the client used for it, what a client process could take
with a core of its own. Then at 90 % of what arrived, on a fixed schedule, the server writing down when it sent each
message; the client's figures are compared with that log (both read the same monotonic clock).
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import numpy as np

from client.drive import SPAWN
from client.loadtest import Plan, run
from client.records import Record, samples_ms
from client.workload import Item
from protos import generation_pb2 as pb


def serve(pipe: Any) -> None:
    """The server process: commands in, logs of send times out."""
    import uvloop

    uvloop.run(_serve(pipe))


async def _serve(pipe: Any) -> None:
    gap, log = 0.0, {}
    plain = pb.GenerateEvent(token_ids=[7], text="seven ").SerializeToString()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked = pb.GenerateRequest.FromString(request)
        count = asked.sampling.max_tokens
        last = pb.GenerateEvent(token_ids=[7], finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
        last.usage.prompt_tokens, last.usage.completion_tokens = 1, count
        sent = log[asked.request_id] = [time.monotonic()]
        began = sent[0] + gap * (hash(asked.request_id) % 1000) / 1000  # streams do not tick together
        for number in range(count):
            if gap:
                await asyncio.sleep(max(0.0, began + gap * (number + 1) - time.monotonic()))
            sent.append(time.monotonic())
            yield plain if number + 1 < count else last.SerializeToString()

    handler = grpc.unary_stream_rpc_method_handler(generate)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("lockstep.v1.Generation", {"Generate": handler}),)
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    while True:
        command, value = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        if command == "gap":
            gap = value
            log.clear()
            pipe.send(None)
        elif command == "log":
            pipe.send(log)
        else:
            await server.stop(None)
            return


def items(streams: int, messages: int) -> list[Item]:
    return [Item(str(index), [1], {"max_tokens": messages}) for index in range(streams)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
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


def measure(pipe: Any, plan: Plan, streams: int, seconds: float) -> dict[str, Any]:
    run(items(streams, 200), plan)  # warms both up
    flood = run(items(streams, 2000), plan)
    rate = flood.figures["output_throughput"]
    capacity = rate / flood.client["cpu_share"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {streams} streams")
    print(f"as fast as it comes: {rate:,.0f} messages/s at {flood.client['cpu_share']:.0%} of a core")
    print(f"one client process with a core of its own could take {capacity:,.0f} messages/s")

    offered = 0.9 * rate  # of what arrived here: a Python server needs more of a core for a message than the client
    gap = streams / offered
    pipe.send(("gap", gap))
    pipe.recv()
    paced = run(items(streams, max(10, int(seconds / gap))), replace(plan, concurrency=streams))
    pipe.send(("log", None))
    truth = [
        Record(name, sent[0], sent[0], sent[-1], "OK", "", 1, len(sent) - 1, 0, 0.0, sent[1:], [1] * (len(sent) - 1))
        for name, sent in pipe.recv().items()
    ]
    reached = paced.figures["output_throughput"]
    print(f"offered {offered:,.0f} messages/s (90 %), arrived {reached:,.0f} ({reached / offered:.0%})")
    mine, theirs = samples_ms(paced.records), samples_ms(truth)
    rows = {}
    for name in ("tpot", "itl"):
        for statistic, of in (("mean", np.mean), ("median", np.median), ("p99", lambda x: np.percentile(x, 99))):
            found, true = float(of(mine[name])), float(of(theirs[name]))
            rows[f"{statistic}_{name}"] = {"client_ms": found, "server_ms": true, "error": found / true - 1}
            print(f"{statistic + ' ' + name:14} client {found:8.3f} ms, server {true:8.3f} ms, {found / true - 1:+.2%}")
    client = paced.client
    verdict = "it says that it is the bottleneck" if client["bottleneck"] else "it sees no bottleneck"
    print(f"the client used {client['cpu_share']:.0%} of a core, timers {client['p99_lag_ms']:.1f} ms late; {verdict}")
    return {
        "streams": streams,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "flood_messages_per_s": rate,
        "flood_cpu_share": flood.client["cpu_share"],
        "capacity_messages_per_s": capacity,
        "offered_messages_per_s": offered,
        "arrived_messages_per_s": reached,
        "figures": rows,
        "client": client,
    }


if __name__ == "__main__":
    main()
