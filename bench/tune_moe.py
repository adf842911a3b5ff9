"""Find the fastest tiles for the experts' products of the given mixtures on this GPU, and write them into its table.

    python bench/tune_moe.py --model bench/configs/olmoe-1b-7b

As `tune_cuda.py`, whose timing it uses: a candidate must first give the bits of the first. Launches take turns over
routings drawn at random, so that at few tokens each reads other experts. Two to three minutes, most of it compilation.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from tune_cuda import graph_us  # noqa: E402

from worker_svc.cuda import moe  # noqa: E402
from worker_svc.cuda.matmul import Tile  # noqa: E402
from worker_svc.cuda.tuning import EXPERT_BUCKETS, FOLDER, expert_key, table, write_table  # noqa: E402
from worker_svc.models import check_snapshot  # noqa: E402
from worker_svc.spec import ModelSpec  # noqa: E402

ROUTINGS = 6
SHARED_BYTES = 227 << 10
# By the rows that an expert gets on average, up to the number: (block_m, block_n, block_k, stages, warps)
LONE = (
    (16, 16, 256, 4, 4), (16, 32, 128, 6, 4), (16, 32, 256, 3, 4), (16, 32, 256, 4, 4), (16, 32, 256, 6, 4),
    (16, 32, 512, 3, 4), (16, 64, 128, 4, 4), (16, 64, 128, 6, 4), (16, 64, 256, 3, 4), (16, 64, 256, 4, 4),
    (16, 32, 128, 4, 4), (16, 32, 128, 8, 4), (16, 64, 64, 8, 4), (16, 64, 128, 5, 4), (16, 128, 64, 6, 4),
    (16, 128, 64, 10, 4), (16, 128, 128, 3, 4), (16, 128, 128, 5, 4), (16, 128, 128, 6, 8), (16, 128, 256, 3, 4),
)  # fmt: skip
FEW = (
    (16, 32, 256, 4, 4), (16, 64, 128, 4, 4), (16, 64, 128, 6, 4), (16, 64, 256, 3, 4), (16, 64, 256, 4, 4),
    (16, 128, 64, 4, 4), (16, 128, 64, 6, 4), (16, 128, 128, 3, 4), (16, 128, 128, 4, 8), (64, 64, 64, 6, 4),
    (64, 64, 128, 4, 4),
)  # fmt: skip
SOME = (
    (16, 128, 128, 3, 4), (16, 128, 128, 4, 8), (32, 64, 128, 4, 4), (32, 128, 64, 4, 4), (64, 64, 64, 4, 4),
    (64, 64, 64, 6, 4), (64, 64, 128, 3, 4), (64, 64, 128, 4, 4), (64, 128, 64, 3, 4), (64, 128, 64, 4, 4),
    (64, 128, 128, 3, 8), (64, 256, 64, 3, 8), (128, 64, 64, 4, 4), (128, 128, 64, 3, 8),
)  # fmt: skip
MANY = (
    (64, 128, 64, 4, 4), (64, 256, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8),
    (128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (128, 128, 128, 3, 8), (256, 128, 64, 3, 8),
)  # fmt: skip


def candidates(rows_each: float, *, gated: bool) -> list[Tile]:
    shapes = LONE if rows_each <= 0.5 else FEW if rows_each <= 8 else SOME if rows_each <= 64 else MANY
    found = [Tile(*shape) for shape in shapes if shape[3] * (shape[0] + shape[1]) * shape[2] * 2 <= SHARED_BYTES]
    if shapes is LONE and not gated:
        found += [replace(tile, prefetch_k=512) for tile in found]
    return found


def routings(spec: ModelSpec, experts: moe.Experts, tokens: int) -> list[tuple[moe.Experts, moe.Routed]]:
    """Experts drawn at random for each token, grouped as the router's kernel groups them."""
    assert spec.moe is not None
    slots, number = spec.moe.experts_per_token, spec.moe.num_experts
    made = []
    for _ in range(ROUTINGS):
        ids = torch.rand(tokens, number, device="cuda").topk(slots).indices.int()
        counts = torch.bincount(ids.flatten(), minlength=number).int()
        lists = None
        if moe.worth_grouping(tokens, slots, number):
            lists = torch.zeros(number, tokens, dtype=torch.int32, device="cuda")
            order = torch.argsort(ids.flatten(), stable=True).int().split(counts.tolist())
            for row, pairs in zip(lists, order, strict=True):
                row[: len(pairs)] = pairs
        own = moe.Experts(experts.gate_up, experts.down, counts)
        pending = None
        if lists is None:  # gate and up choose for themselves: logits that say what is in `ids`
            falling = torch.arange(slots, 0, -1, device="cuda", dtype=torch.float32).expand(ids.shape)
            logits = torch.full((tokens, number), -9.0, device="cuda").scatter_(1, ids.long(), falling)
            pieces = triton.cdiv(spec.hidden_size, moe.PIECE)
            pending = torch.zeros(pieces, tokens, number, device="cuda")
            pending[0] = logits
        made.append((own, moe.Routed(ids, torch.ones(ids.shape, device="cuda"), lists, pending)))
    return made


def best(spec: ModelSpec, experts: moe.Experts, tokens: int, *, gated: bool) -> Tile:
    assert spec.moe is not None
    slots, inner, width = spec.moe.experts_per_token, spec.intermediate_size, spec.hidden_size
    routed = routings(spec, experts, tokens)
    pairs = tokens * slots
    x = torch.randn((tokens, width) if gated else (pairs, inner), device="cuda").bfloat16()
    w = experts.gate_up if gated else experts.down
    out = torch.empty(pairs, inner if gated else width, device="cuda", dtype=torch.bfloat16)
    count = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    name = f"{2 * inner}x{width} gated" if gated else f"{width}x{inner}"
    want: Tensor | None = None
    timed: list[tuple[float, Tile]] = []
    for tile in candidates(pairs / spec.moe.num_experts, gated=gated):

        def launch(own: moe.Experts, one: moe.Routed, tile: Tile = tile) -> None:
            moe.product(x, w, out, own, one, count, tile, gated=gated, dependent=tokens <= 128)

        try:
            launch(*routed[0])
        except Exception as error:  # too large for this device: no candidate
            print(f"{tile}: {error}", file=sys.stderr)
            continue
        want = out.clone() if want is None else want
        if not torch.equal(out, want):
            print(f"{tile} has other bits for {name}@{tokens}", file=sys.stderr)
            continue
        us = graph_us([lambda r=r: launch(*r) for r in routed], 5)  # type: ignore[misc]
        timed.append((us, tile))
    us, tile = min(timed, key=lambda t: t[0])
    print(f"{name}@{tokens}: {us:.1f} us, {tile}", flush=True)
    return tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--tokens", type=int, nargs="*", default=EXPERT_BUCKETS, help="buckets to tune")
    parser.add_argument("--out", type=Path, help="default: the table of this GPU in worker_svc/cuda/tuned")
    options = parser.parse_args()
    name = torch.cuda.get_device_name()
    path = options.out or FOLDER / f"{name.lower().replace(' ', '_')}.json"
    tiles = dict(table(name))
    for folder in options.model:
        spec = check_snapshot(folder, weights=False).spec
        assert spec.moe is not None, f"{folder} is not a mixture of experts"
        number, inner, width = spec.moe.num_experts, spec.intermediate_size, spec.hidden_size
        experts = moe.prepare(
            torch.empty(number, 2 * inner, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02),
            torch.empty(number, width, inner, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02),
        )
        for bucket in options.tokens:
            for gated, n, k in ((True, 2 * inner, width), (False, width, inner)):
                found = best(spec, experts, bucket, gated=gated)
                tiles[expert_key(n, k, bucket, number, spec.moe.experts_per_token, gated)] = found
                write_table(path, tiles)
    print(json.dumps({"table": str(path), "entries": len(tiles)}))


if __name__ == "__main__":
    main()
