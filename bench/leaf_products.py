"""What leaves cost: o_proj and down_proj of a model in leaves, against the plain product with this GPU's tuned tile.

    python bench/leaf_products.py --model bench/configs/qwen3-8b [--leaves 8] [--rows 1 16 64 256 4096] [--out FILE]

Every candidate must give the bits of the first. Times are those of a graph over weights that do not fit the cache
together (`tune_cuda.graph_us`). Prints one line a candidate and one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from tune_cuda import WEIGHT_BYTES, graph_us  # noqa: E402

from worker_svc.cuda import leaf_product  # noqa: E402
from worker_svc.cuda.leaf_product import LeafTile, apart, fold_rows, folded  # noqa: E402
from worker_svc.cuda.matmul import linear  # noqa: E402
from worker_svc.cuda.ops import FEW_ROWS  # noqa: E402
from worker_svc.cuda.tuning import tile_for  # noqa: E402
from worker_svc.models import check_snapshot  # noqa: E402

APART = tuple(
    LeafTile(m, n, k, stages, 4)
    for m in (16, 64)
    for n, k, stages in ((32, 128, 4), (64, 128, 3), (64, 128, 4), (64, 256, 3), (128, 128, 3))
)
FOLDED = (
    LeafTile(128, 128, 64, 4, 8), LeafTile(128, 128, 64, 3, 8), LeafTile(128, 256, 64, 3, 8),
    LeafTile(64, 128, 64, 4, 4), LeafTile(128, 64, 64, 4, 4), LeafTile(128, 128, 128, 2, 8),
    LeafTile(64, 256, 64, 3, 8), LeafTile(64, 128, 64, 3, 4),
)  # fmt: skip


def measure(n: int, k: int, rows: int, leaves: int) -> list[dict[str, object]]:
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, min(12, WEIGHT_BYTES // (2 * n * k))))
    ]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    count = torch.tensor([rows], dtype=torch.int32, device="cuda")
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    plain, dependent = tile_for(torch.cuda.get_device_name(), n, k, rows), rows <= FEW_ROWS

    def product(w: Tensor) -> object:
        return linear(x, w, out, count, plain, dependent=dependent)

    def in_leaves(tile: LeafTile) -> Callable[[Tensor], Tensor]:
        if rows <= leaf_product.APART_ROWS:
            return lambda w: fold_rows(
                apart(x, w, leaves, count, tile, dependent=dependent), torch.bfloat16, dependent=dependent
            )
        return lambda w: folded(x, w, leaves, count, torch.bfloat16, tile=tile, dependent=dependent)

    us = graph_us([lambda w=w: product(w) for w in weights], 9)  # type: ignore[misc]
    found: list[dict[str, object]] = [
        {"n": n, "k": k, "rows": rows, "leaves": 1, "us": round(us, 2), "tile": str(plain)}
    ]
    want: Tensor | None = None
    for tile in APART if rows <= leaf_product.APART_ROWS else FOLDED:
        if rows > 16 and tile.block_m == 16 and rows > 64:
            continue
        call = in_leaves(tile)
        try:
            got = call(weights[0])
        except Exception as error:
            print(f"{tile}: {str(error)[:80]}", file=sys.stderr)
            continue
        want = got if want is None else want
        us = graph_us([lambda w=w, call=call: call(w) for w in weights], 9)  # type: ignore[misc]
        equal = torch.equal(got, want)
        found.append(
            {"n": n, "k": k, "rows": rows, "leaves": leaves, "us": round(us, 2), "tile": str(tile), "equal": equal}
        )
    for line in found:
        print(
            f"{n}x{k} rows {rows:5d} leaves {line['leaves']} {line['us']:8} us {line.get('equal', '')} {line['tile']}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--leaves", type=int, help="default: the model's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 4096])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = check_snapshot(options.model, weights=False).spec
    found = []
    for k in (spec.q_size, spec.intermediate_size):
        for rows in options.rows:
            found += measure(spec.hidden_size, k, rows, options.leaves or spec.leaves)
    text = json.dumps({"device": torch.cuda.get_device_name(), "command": " ".join(sys.argv), "products": found})
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if all(line.get("equal", True) for line in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
