"""CPU speed of the demo model through gRPC: `python bench/cpu_bench.py [--json FILE]`.

128 prompt tokens and 128 generated ones, batches of 1, 4 and 16 sent together over one GenerateMany stream to a real
`lockstep-up` (bf16), in both kinds of numerics. A figure is generated tokens over the wall time from sending the first
request to the last event, prefill included; the median of the repetitions. `outside` is the share of that time in
which no worker ran a step: scheduler, gRPC, client. The peers do the same work in the same run on the same machine:
transformers, and llama.cpp where its own benchmark is named (--llama-batched-bench BINARY --gguf FILE; the file is the
same snapshot, by its converter with --outtype bf16), which counts no sampling and no serving.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROMPT, OUTPUT = 128, 128


def prompts(count: int, repetition: int) -> list[list[int]]:
    """Fresh ids for each repetition, so that no prefix is found in a cache."""
    random = np.random.default_rng((count, repetition))
    return [random.integers(1000, 40000, PROMPT).tolist() for _ in range(count)]


@contextmanager
def services(model: str, numerics: str, dtype: str) -> Iterator[tuple[str, float]]:
    """The address of a running cluster, and the seconds that it took to start."""
    began = time.monotonic()
    up = subprocess.Popen(
        [str(Path(sys.executable).parent / "lockstep-up"), "--model", model, "--listen", "127.0.0.1:0",
         "--numerics", numerics, "--dtype", dtype, "--max-num-seqs", "32"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert up.stdout is not None
    said = []
    try:
        for line in up.stdout:
            said.append(line)
            if found := re.search(r"ready on (\S+)", line):
                yield found[1], time.monotonic() - began
                break
        else:
            raise SystemExit("lockstep-up ended:\n" + "".join(said[-20:]))
    finally:
        up.terminate()
        up.communicate(timeout=30)


def measure(address: str, batch: int, repetitions: int) -> dict[str, float]:
    from client import Completion, Lockstep

    rates, shares = [], []
    with Lockstep(address) as client:
        for repetition in range(repetitions + 1):
            before = client.stats().values['step_seconds_total{phase="worker_run"}']
            began = time.monotonic()
            answers = client.batch(
                prompts(batch, repetition), max_tokens=OUTPUT, ignore_eos=True, temperature=0.6, seed=repetition
            )
            wall = time.monotonic() - began
            ran = client.stats().values['step_seconds_total{phase="worker_run"}'] - before
            tokens = sum(len(answer.token_ids) for answer in answers if isinstance(answer, Completion))
            assert tokens == batch * OUTPUT, answers
            if repetition:  # the first one warms up
                rates.append(tokens / wall)
                shares.append(1 - ran / wall)
    return {"tokens_per_s": statistics.median(rates), "outside": statistics.median(shares)}


def measure_transformers(model: str, dtype: str, batch: int, repetitions: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    rates = []
    for repetition in range(repetitions + 1):
        ids = torch.tensor(prompts(batch, repetition))
        began = time.monotonic()
        with torch.inference_mode():
            out = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=True,
                temperature=0.6, top_k=0, top_p=1.0,
            )  # fmt: skip
        assert out.shape[1] == PROMPT + OUTPUT
        if repetition:
            rates.append(batch * OUTPUT / (time.monotonic() - began))
    return {"tokens_per_s": statistics.median(rates)}


def measure_llama_cpp(binary: str, gguf: str, batch: int, repetitions: int) -> dict[str, float]:
    """Its tool times prompts and tokens apart; the figure is all generated tokens over both."""
    rates = []
    for repetition in range(repetitions + 1):
        run = subprocess.run(
            [binary, "-m", gguf, "-npp", str(PROMPT), "-ntg", str(OUTPUT), "-npl", str(batch),
             "-c", str(batch * (PROMPT + OUTPUT)), "-t", str(len(os.sched_getaffinity(0))), "--output-format", "jsonl"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        row = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
        assert (row["pp"], row["tg"], row["pl"]) == (PROMPT, OUTPUT, batch), row
        if repetition:
            rates.append(batch * OUTPUT / row["t"])
    return {"tokens_per_s": statistics.median(rates)}


def machine() -> dict[str, Any]:
    import torch

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flags and flag in flags[1].split()]
    return {
        "cpu": name[1] if name else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "flags": known,
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a snapshot; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--numerics", nargs="+", default=["invariant", "fast"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--llama-batched-bench", metavar="BINARY", help="llama.cpp's benchmark, with --gguf")
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--json", type=Path, help="write the result")
    options = parser.parse_args()
    if (options.llama_batched_bench is None) != (options.gguf is None):
        parser.error("--llama-batched-bench and --gguf go together")
    if options.model is None:
        from worker_svc.loading import demo_model

        options.model = str(demo_model.ensure())
    result: dict[str, Any] = {"machine": machine(), "dtype": options.dtype, "rows": []}

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        if options.json is not None:  # after each row: a long run that is cut short has told something
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"{'':24}" + "".join(f"{f'batch {batch}':>18}" for batch in options.batches))
    for numerics in options.numerics:
        with services(options.model, numerics, options.dtype) as (address, start):
            cells = {batch: measure(address, batch, options.repetitions) for batch in options.batches}
        words = [f"{cell['tokens_per_s']:.0f} ({cell['outside']:.1%})" for cell in cells.values()]
        print(f"{f'lockstep {numerics}':24}" + "".join(f"{word:>18}" for word in words) + f"   ready in {start:.1f} s")
        keep({"engine": "lockstep", "numerics": numerics, "ready_s": start, "batches": cells})
    if not options.no_peer:
        cells = {
            batch: measure_transformers(options.model, options.dtype, batch, options.repetitions)
            for batch in options.batches
        }
        print(f"{'transformers':24}" + "".join(f"{cell['tokens_per_s']:>18.0f}" for cell in cells.values()))
        keep({"engine": "transformers", "batches": cells})
    if options.llama_batched_bench:
        cells = {
            batch: measure_llama_cpp(options.llama_batched_bench, options.gguf, batch, options.repetitions)
            for batch in options.batches
        }
        print(f"{'llama.cpp':24}" + "".join(f"{cell['tokens_per_s']:>18.0f}" for cell in cells.values()))
        keep({"engine": "llama.cpp", "batches": cells})
    print("tokens/s (share of the time outside the workers' steps)")


if __name__ == "__main__":
    main()
