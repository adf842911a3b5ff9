"""Attention's candidates on a GPU: each must have the bits of the plain kernels, and shows its times beside theirs.

    python bench/attention_candidates.py [--out DIR] [--names early ...]

A candidate is a `Tuning`; each is checked, and then timed, in a process of its own with a bound on its time, so that
one that hangs costs no more than that. Prints a line for each and which to adopt.
Prefill in TFLOP/s counts 4 * H * D * S^2 / 2 for S causal tokens; decode and fold are in us a launch, keys and values
not in L2 before; decode's TB/s count its keys and values once. `dependent` launches wait for each other on the device.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cuda.paged import Paged, Rows  # noqa: E402
from worker_svc.cuda import attention  # noqa: E402
from worker_svc.cuda.attention import RECORD, SPLIT, Shape, Tuning, Work  # noqa: E402
from worker_svc.cuda.step_state import PARAMETERS  # noqa: E402

PLAIN = Tuning(hopper_prefill=False, hopper_decode_rows=0, fold_ahead=1, fold_width=128)
DEVICE, DTYPE = "cuda", torch.bfloat16
CHECK_S, TIME_S, MORE_S = 90, 60, 10  # of a process, and for each further candidate in it
SHAPES = {"8B": Shape(32, 8, 128, 64), "0.6B": Shape(16, 8, 128, 64)}
MORE_SHAPES = {
    "small blocks": Shape(32, 8, 128, 16), "window": Shape(32, 8, 128, 64, window=300),
    "width 64": Shape(32, 8, 64, 32),
    "3 heads a kv head": Shape(24, 8, 128, 64), "1 head a kv head": Shape(8, 8, 128, 128),
}  # fmt: skip
DECODE_SHAPES = {
    "12 heads a kv head": Shape(96, 8, 128, 64), "2 heads, small blocks": Shape(16, 8, 128, 32),
    "width 64, window": Shape(32, 8, 64, 64, window=700), "width 64, small blocks": Shape(32, 8, 64, 16),
}  # fmt: skip
PREFILLS = [("8B", 1, 8192), ("8B", 2, 4096), ("8B", 16, 512), ("0.6B", 1, 8192), ("0.6B", 2, 4096)]
DECODES = [(1, 512), (1, 8192), (4, 8192), (64, 4096), (256, 900)]
LENGTHS = [700, 513, 64, 257, 1100, 63, 65, 256, 255, 3000, 129, 1]
MANY = [1 + 389 * i % 1201 for i in range(64)]  # more work items than a program that stays has slots for


@dataclass(frozen=True)
class Candidate:
    kind: str  # prefill, decode
    tuning: Tuning
    shapes: tuple[str, ...] = ("8B", "0.6B")  # checked at these
    timed: bool = True


def _hopper(**more: Any) -> Tuning:
    return Tuning(hopper_prefill=True, **more)


def _ring(programs: int, stages: int) -> Tuning:
    return Tuning(hopper_decode_rows=1 << 20, hopper_decode_programs=programs, hopper_decode_stages=stages)


CANDIDATES = {
    "stages5": Candidate("prefill", _hopper(hopper_stages=5)),
    "stages5shapes": Candidate("prefill", _hopper(hopper_stages=5), tuple(MORE_SHAPES), timed=False),
    "stages4": Candidate("prefill", _hopper(hopper_stages=4)),
    "stages3": Candidate("prefill", _hopper(hopper_stages=3)),
    "stages6": Candidate("prefill", _hopper(hopper_stages=6)),
    "fold4": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=4)),
    "fold8": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=8)),
    "fold8shapes": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=8), tuple(MORE_SHAPES), timed=False),
    "fold16": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=16)),
    "fold8wide": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=8, fold_width=128)),
    "fold8narrow": Candidate("decode", Tuning(hopper_decode_rows=0, fold_ahead=8, fold_rows=256)),
    "programs528": Candidate("decode", Tuning(hopper_decode_rows=0, decode_programs=528)),
    "programs2112": Candidate("decode", Tuning(hopper_decode_rows=0, decode_programs=2112)),
    "programs4224": Candidate("decode", Tuning(hopper_decode_rows=0, decode_programs=4224)),
    "warps1": Candidate("decode", Tuning(hopper_decode_rows=0, decode_programs=2112, decode_warps=1)),
    "stages5decode": Candidate("decode", Tuning(hopper_decode_rows=0, decode_stages=5)),
    "ring2x6": Candidate("decode", _ring(2, 6)),
    "ring2x6shapes": Candidate("decode", _ring(2, 6), tuple(MORE_SHAPES), timed=False),
    "ring2x6shapes2": Candidate("decode", _ring(2, 6), tuple(DECODE_SHAPES), timed=False),
    "ring1x13": Candidate("decode", _ring(1, 13)),
    "ring1x8": Candidate("decode", _ring(1, 8)),
    "ring3x4": Candidate("decode", _ring(3, 4)),
}


def _hide(paged: Paged) -> None:
    """Nobody may see what lies behind a row's last key: in its last block, and in the block that no row has."""
    for cache in (paged.k, paged.v):
        cache[0] = float("nan")
        for slot, length in enumerate(paged.lengths):
            used, left = divmod(length, paged.shape.block_size)
            if left:
                cache[paged.tables[slot, used].item(), :, left:] = float("nan")


def _differences(paged: Paged, spans: list[tuple[int, int, int]], tuning: Tuning) -> list[str]:
    want = paged.run(spans, PLAIN)
    for _ in range(3):
        out = paged.run(spans, tuning)
        if not torch.equal(out, want):
            return [f"{(out != want).any(-1).any(-1).sum().item()} of {len(out)} rows"]
    return [] if want.isfinite().all() else ["the plain kernel's are not finite"]


def check(candidate: Candidate) -> str:
    """Empty, or what differs."""
    wrong: list[str] = []
    for name in candidate.shapes:
        shape = (SHAPES | MORE_SHAPES | DECODE_SHAPES)[name]
        cases = [LENGTHS] if candidate.kind == "prefill" else [LENGTHS, MANY]
        for lengths in cases:
            paged = Paged(shape, lengths, DEVICE, DTYPE, seed=len(name))
            _hide(paged)
            if candidate.kind == "prefill":
                spans = [
                    [(s, 0, n) for s, n in enumerate(lengths)],
                    [(0, 100, 333), (1, 257, 256), (3, 200, 57), (2, 63, 1), (9, 2900, 100), (4, 1024, 76), (10, 9, 2)],
                    [(9, 255, 2), (9, 512, 17), (4, 3, 1000), (8, 254, 1)],
                ]
            else:
                backs = (0, 1, 62, 130, 255)
                spans = [[(s, n - 1 - min(n - 1, back), 1) for s, n in enumerate(lengths)] for back in backs]
            for i, part in enumerate(spans):
                found = _differences(paged, part, candidate.tuning)
                wrong += [f"{name}, {len(lengths)} rows, spans {i}: {what}" for what in found]
    return "; ".join(wrong)


class Case:
    """`copies` of a step over different sequences, so that none finds its keys in L2."""

    def __init__(self, shape: Shape, rows: int, context: int, new: int, tuning: Tuning, copies: int) -> None:
        self.shape, self.tuning, self.max_rows, self.copies = shape, tuning, rows, copies
        per_row = -(-context // SPLIT) * SPLIT // shape.block_size
        pool = [rows * copies * per_row, shape.kv_heads, shape.block_size, shape.head_dim]
        self.k = torch.empty(pool, device=DEVICE, dtype=DTYPE).normal_()
        self.v = torch.empty_like(self.k).normal_()
        self.q = torch.randn(rows * new, shape.heads, shape.head_dim, device=DEVICE).to(DTYPE)
        self.out = torch.empty_like(self.q)
        height = attention.tile_tokens(shape, tuning)
        tiles = [(r, t) for t in range(0, new, height) for r in range(rows)][::-1] if new > 1 else []
        self.max_tiles = len(tiles) or 1

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.rows = []
        order = torch.randperm(pool[0], device=DEVICE).int().view(copies, rows, per_row)
        for copy in range(copies):
            state = torch.zeros(rows, PARAMETERS + per_row, dtype=torch.int32, device=DEVICE)
            state[:, PARAMETERS:] = order[copy]
            self.rows.append(
                Rows(
                    state,
                    state[:, PARAMETERS:],
                    column(list(range(rows))),
                    column([r * new for r in range(rows + 1)]),
                    column([context - new] * rows),
                    column([context if new == 1 else 0] * rows),
                    column([rows]),
                    column([r for r, _ in tiles] or [0]),
                    column([t for _, t in tiles] or [0]),
                    column([len(tiles)]),
                    torch.full((rows, RECORD), -1, dtype=torch.int32, device=DEVICE),
                    column([0]),
                    column([0]),
                )
            )
        self.work = Work(shape, rows, context, DEVICE)
        attention.plan(shape, self.rows[0], self.work, rows)

    def prefill(self, i: int) -> None:
        attention.prefill(self.shape, self.q, self.k, self.v, self.rows[i], self.out, self.max_tiles, self.tuning)

    def decode(self, i: int, *, dependent: bool = False) -> None:
        attention.decode(
            self.shape, self.q, self.k, self.v, self.rows[i], self.work, self.out, self.max_rows, self.tuning,
            dependent=dependent,
        )  # fmt: skip

    def dependent(self, i: int) -> None:
        self.decode(i, dependent=True)

    def fold(self, i: int) -> None:
        attention.fold(self.shape, self.rows[i], self.work, self.out, self.max_rows, self.tuning)

    def us(self, of: str) -> float:
        """Best of a few replays of a graph of all copies, a copy."""
        launch = getattr(self, of)
        for i in range(self.copies):
            launch(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.copies):
                launch(i)
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.copies)
        return min(times)


def times(candidate: Candidate) -> dict[str, float]:
    found: dict[str, float] = {}
    if candidate.kind == "prefill":
        for model, rows, tokens in PREFILLS:
            shape = SHAPES[model]
            us = Case(shape, rows, tokens, tokens, candidate.tuning, 2).us("prefill")
            found[f"{model} {rows}x{tokens}"] = 2 * rows * shape.heads * shape.head_dim * tokens**2 / us / 1e6
    else:
        for rows, context in DECODES:
            copies = max(1, min(32, (96 << 20) // (rows * context * 4096)))
            case = Case(SHAPES["8B"], rows, context, 1, candidate.tuning, copies)
            us = found[f"{rows}x{context}"] = case.us("decode")
            found[f"TB/s {rows}x{context}"] = rows * context * 4096 / us / 1e6
            found[f"dependent {rows}x{context}"] = case.us("dependent")
            found[f"fold {rows}x{context}"] = case.us("fold")
            torch.cuda.empty_cache()
    return {key: round(value, 2) for key, value in found.items()}


PLAINS = {f"plain {kind}": Candidate(kind, PLAIN) for kind in ("prefill", "decode")}


def child(act: str, names: list[str]) -> None:
    every = CANDIDATES | PLAINS
    print(json.dumps({name: check(every[name]) if act == "check" else times(every[name]) for name in names}))


def run(act: str, groups: list[list[str]], together: int, bound_s: float) -> dict[str, Any]:
    """What children say of their names; a string that says so where one failed."""
    said: dict[str, Any] = {}
    waiting, running = list(groups), []
    while waiting or running:
        while waiting and len(running) < together:
            command = [sys.executable, __file__, "--child", act, *waiting[0]]
            log = tempfile.TemporaryFile("w+")
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            running.append((waiting.pop(0), process, log, time.monotonic()))
        time.sleep(0.1)
        for one in list(running):
            names, process, log, since = one
            took, late = time.monotonic() - since, process.poll() is None
            if late and took < bound_s + MORE_S * (len(names) - 1):
                continue
            if late:
                process.kill()
                process.wait()
            running.remove(one)
            log.seek(0)
            lines = log.read().strip().splitlines() or [""]
            if late or process.returncode:
                why = f"no answer in {took:.0f} s" if late else "failed: " + " | ".join(lines[-3:])[-500:]
                said |= dict.fromkeys(names, why)
            else:
                said |= json.loads(lines[-1])
            for name in names:
                print(f"[{act}] {name}: {said[name] or 'equal'} ({took:.0f} s)", file=sys.stderr, flush=True)
    return said


def _groups(names: list[str], decode_in: int) -> list[list[str]]:
    """Kernels written by hand each in a process, the others in a few."""
    every = CANDIDATES | PLAINS
    decode = [name for name in names if every[name].kind == "decode" and every[name].tuning.hopper_decode_rows == 0]
    cut = [decode[i::decode_in] for i in range(decode_in)]
    return [[name] for name in names if name not in decode] + [group for group in cut if group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--together", type=int, default=10, help="checks at a time")
    parser.add_argument("--child", nargs="+", help="for its own use")
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], options.child[1:])
    checks = run("check", _groups(options.names, 3), options.together, CHECK_S)
    good = [name for name in options.names if checks[name] == ""]
    kinds = sorted({CANDIDATES[name].kind for name in options.names})
    to_time = [*(f"plain {kind}" for kind in kinds), *(name for name in good if CANDIDATES[name].timed)]
    timed = run("time", _groups(to_time, 1), 1, TIME_S)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for kind in kinds:
        print(f"== {kind}, {'TFLOP/s' if kind == 'prefill' else 'us'}")
        scores: dict[str, float] = {}
        for name in [f"plain {kind}", *(name for name in options.names if CANDIDATES[name].kind == kind)]:
            bits = "plain" if name.startswith("plain") else ("bits equal" if name in good else checks[name])
            result = timed.get(name, {})
            row = " ".join(f"{k}: {v:.2f}" for k, v in result.items()) if isinstance(result, dict) else result
            print(f"{name:18} [{bits}] {row}")
            if isinstance(result, dict) and result:
                timed_as = [k for k in result if k.split()[0] not in ("fold", "TB/s", "dependent")]
                values = [result[k] if kind == "prefill" else 1 / result[k] for k in timed_as]
                scores[name] = sum(math.log(value) for value in values)
        best = max(scores, key=lambda name: scores[name], default="none")
        tuning = CANDIDATES[best].tuning if best in CANDIDATES else PLAIN
        print(f"recommended for {kind}: {best}: {tuning}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"device": torch.cuda.get_device_name(), "checks": checks, "times": timed}
        (options.out / "attention_candidates.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
