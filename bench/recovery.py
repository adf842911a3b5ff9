"""How long streams stand still when the worker is killed, and whether they go on with the same bits.

    python bench/recovery.py --model bench/configs/qwen3-8b --streams 64 --json bench/results/h200/recovery.json

Starts the services as `serve_bench.py` does, runs the streams undisturbed, then again with SIGKILL for the worker in
the middle and another worker in its place at once. The last line is `recovered=N differing=D stalled_s=S`: S is the
longest time any stream waited for its next token. Exit code 0: every stream ended and no id differs.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from serve_bench import Gpu, Item, Services, commit, send  # noqa: E402

from client.workload import prompt_ids  # noqa: E402


def requests(streams: int, tokens: int) -> list[Item]:
    return [Item(f"r{i}", prompt_ids(7000 + i, 200 + 13 * i), tokens, i) for i in range(streams)]


async def disturbed(options: argparse.Namespace, services: Services, items: list[Item]):  # type: ignore[no-untyped-def]
    """What the streams were told while the worker was replaced, and how long that took by the longest gap."""
    running = asyncio.create_task(send(services.address, [item.message(item.name) for item in items], options.timeout))
    await asyncio.sleep(options.kill_after)
    assert not running.done(), "the streams ended before the kill; ask for more tokens"
    await asyncio.to_thread(services.replace_worker)
    return await running


async def measure(options: argparse.Namespace, services: Services) -> dict[str, object]:
    items = requests(options.streams, options.tokens)
    await send(services.address, [item.message(f"warm-{item.name}", max_tokens=8) for item in items])
    whole, seconds = await send(services.address, [item.message(item.name) for item in items], options.timeout)
    stalls, differing, recovered = [], 0, 0
    for _ in range(options.rounds):
        broken, _ = await disturbed(options, services, items)
        gaps = [max(stream.gaps_ms) * 1e-3 for stream in broken.values()]
        stalls.append(round(max(gaps), 2))
        differing += sum(broken[name].ids != stream.ids for name, stream in whole.items())
        recovered += sum(len(broken[item.name].ids) == item.max_tokens for item in items)
        print(f"stalled {stalls[-1]} s; worker: {services.start_split()}", flush=True)
    return {
        "model": Path(options.model).name, "streams": options.streams, "tokens": options.tokens,
        "undisturbed_s": round(seconds, 2), "stalled_s": stalls, "recovered": recovered, "differing": differing,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kill-after", type=float, default=2.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/recovery"))
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.set_defaults(
        numerics="invariant", worker_flag=[], block_size=64, max_num_seqs=256, max_batch_tokens=8192,
        max_seq_len=17408, pipeline_depth=3, start_timeout=180.0,
    )  # fmt: skip
    options = parser.parse_args()
    services = Services(options, options.logs)
    try:
        began = time.perf_counter()
        figures = asyncio.run(measure(options, services))
    finally:
        services.stop()
    figures |= {"device": Gpu().name, "seconds": round(time.perf_counter() - began, 1), "commit": commit()}
    figures["command"] = "python " + " ".join(sys.argv)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    longest = max(figures["stalled_s"])  # type: ignore[call-overload]
    print(f"recovered={figures['recovered']} differing={figures['differing']} stalled_s={longest}")
    whole = figures["recovered"] == options.streams * options.rounds
    return 0 if whole and figures["differing"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
