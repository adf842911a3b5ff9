"""Which tile a product gets: a table a device in `tuned/`, made by `bench/tune_cuda.py`, and a rule where it has no
entry.

Knows shapes and files. Nothing here can change a bit (`matmul.py`), so a table may be remade at any time.
"""

import functools
import json
from dataclasses import asdict
from pathlib import Path

from worker_svc.cuda.matmul import Tile

FOLDER = Path(__file__).parent / "tuned"
EXPERT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)  # the same, of experts' products
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 2048)  # heights that are tuned apart; a larger one counts as the last


def bucket_of(rows: int, buckets: tuple[int, ...] = BUCKETS) -> int:
    return next((bucket for bucket in buckets if rows <= bucket), buckets[-1])


def key(n: int, k: int, bucket: int, gated: bool) -> str:
    return f"{n}x{k}{'g' if gated else ''}@{bucket}"


@functools.cache
def table(device_name: str) -> dict[str, Tile]:
    """Tiles by `key`; empty for a device that nobody has tuned for."""
    path = FOLDER / f"{device_name.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return {name: Tile(**tile) for name, tile in json.loads(path.read_text()).items()}


def write_table(path: Path, tiles: dict[str, Tile]) -> None:
    """One entry a line, sorted, so that a change of one is a change of one line."""
    lines = (f"  {json.dumps(name)}: {json.dumps(asdict(tile))}" for name, tile in sorted(tiles.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rule(n: int, rows: int) -> Tile:
    """A tile that is never bad."""
    if rows <= 16:
        return Tile(16, 64 if n >= 16384 else 32, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 64 if n >= 16384 else 32, 128, 4, 4)
    if rows <= 256:
        return Tile(128, 128, 64, 4, 8, persistent=True)
    return Tile(128, 256 if n >= 4096 else 128, 64, 3, 8, persistent=True)


def expert_key(n: int, k: int, bucket: int, experts: int, slots: int, gated: bool) -> str:
    return f"{n}x{k}{'g' if gated else ''}/{slots}of{experts}@{bucket}"


def expert_rule(rows: int, experts: int, slots: int) -> Tile:
    """By the rows that an expert gets on average. Experts get unequal shares, so a tile is twice the average."""
    share = rows * slots / experts
    if share <= 0.5:  # every pair is a tile of its own
        return Tile(16, 32, 256, 4, 4, prefetch_k=512)
    if share <= 8:
        return Tile(16, 64, 128, 4, 4)
    if share <= 64:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 64, 4, 8)


def expert_tile_for(
    device_name: str, n: int, k: int, rows: int, experts: int, slots: int, *, gated: bool = False
) -> Tile:
    """The tile for the product of `rows` tokens with `slots` of `experts` matrices [n, k] each."""
    name = expert_key(n, k, bucket_of(rows, EXPERT_BUCKETS), experts, slots, gated)
    return table(device_name).get(name) or expert_rule(rows, experts, slots)


def tile_for(device_name: str, n: int, k: int, rows: int, *, gated: bool = False) -> Tile:
    """The tile for [rows, k] x [k, n]; n counts gate and up rows both. Few rows that nobody tuned apart do as 16 do."""
    tiles, bucket = table(device_name), bucket_of(rows)
    found = tiles.get(key(n, k, bucket, gated))
    if found is None and bucket == BUCKETS[0]:
        found = tiles.get(key(n, k, BUCKETS[1], gated))
    return found or rule(n, rows)
