"""`lockstep-plan`: what a model takes and how fast a decode step can be, before any machine is rented.

Knows the spec's shapes, bytes and a roofline of three parts: weights, keys and values, collectives. Does not know
kernels: times are floors. Invariant: parameters are counted from the layers' own declarations and the pool is sized by
`kv_cache.blocks_in`, the code that loads and serves, so the plan and the service cannot disagree.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worker_svc.kv_cache import blocks_in, kv_bytes_per_token
from worker_svc.models.decoder import Decoder, Family
from worker_svc.models.load import NO_OPS, read_spec
from worker_svc.spec import ModelRefused, ModelSpec, Shard, read_json

GIB = 2**30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
LENGTHS = (1024, 4096, 8192, 16384, 32768, 40960, 131072)
BATCHES = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's device and its links. Bandwidths in bytes a second, latency in seconds."""

    memory_bytes: float
    utilisation: float = 0.9
    memory_bandwidth: float = 4.25e12
    link_bandwidth: float = 400e9
    link_latency: float = 10e-6


@dataclass(frozen=True, slots=True)
class StepTime:
    """Floor of one decode step, in milliseconds."""

    batch: int
    context: int
    weights_ms: float
    kv_ms: float
    collectives_ms: float

    @property
    def total_ms(self) -> float:
        return self.weights_ms + self.kv_ms + self.collectives_ms

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.batch / self.total_ms


@dataclass(frozen=True, slots=True)
class Plan:
    family: str
    tp: int
    parameters: int  # of the whole model
    weight_bytes: int  # of a rank, on average
    largest_weight_bytes: int  # vocabulary shards are whole blocks, so ranks differ a little
    kv_bytes_per_token: int  # on all ranks, each head counted once
    kv_bytes_per_token_rank: int
    pool_bytes: int  # of one rank
    pool_tokens: int
    sequences: dict[int, float]  # at a length: how many fit
    steps: tuple[StepTime, ...]

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["steps"] = [
            asdict(step) | {"total_ms": step.total_ms, "tokens_per_s": step.tokens_per_s} for step in self.steps
        ]
        return values


def count_parameters(family: Family, spec: ModelSpec, shard: Shard) -> int:
    """Elements that this rank holds."""
    parameters = Decoder(family, spec, shard, NO_OPS).parameters()
    return sum(math.prod(parameter.shape) for parameter in parameters)


def pool_tokens(pool_bytes: float, spec: ModelSpec, shard: Shard, item_bytes: int, block_size: int = 16) -> int:
    return blocks_in(int(pool_bytes), spec, shard, item_bytes, block_size) * block_size


def make_plan(
    config: dict[str, Any],
    hardware: Hardware,
    *,
    tp: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    block_size: int = 16,
    pool_bytes: float | None = None,
    context: int = 4096,
) -> Plan:
    """Raises ModelRefused for what is unsupported, is not divided by tp, or leaves no room for keys and values."""
    family, spec = read_spec(config)
    spec.check_tp(tp)
    item, kv_item = ITEM_BYTES[dtype], ITEM_BYTES[kv_dtype or dtype]
    held = [count_parameters(family, spec, Shard(rank, tp)) * item for rank in range(tp)]
    weights = max(held)
    free = hardware.memory_bytes * hardware.utilisation - weights if pool_bytes is None else pool_bytes
    shard = Shard(0, tp)
    tokens = pool_tokens(free, spec, shard, kv_item, block_size)
    if tokens <= 0:
        raise ModelRefused(
            [
                f"no room for keys and values: weights take {weights / GIB:.2f} GiB of "
                f"{hardware.memory_bytes * hardware.utilisation / GIB:.2f} GiB a rank at tp {tp}"
            ]
        )
    lengths = sorted({length for length in LENGTHS if length < spec.max_position_embeddings})
    lengths.append(spec.max_position_embeddings)
    return Plan(
        family=spec.family,
        tp=tp,
        parameters=count_parameters(family, spec, Shard()),
        weight_bytes=round(sum(held) / tp),
        largest_weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(spec, Shard(), kv_item),
        kv_bytes_per_token_rank=kv_bytes_per_token(spec, shard, kv_item),
        pool_bytes=int(free),
        pool_tokens=tokens,
        sequences={length: tokens / length for length in lengths},
        steps=tuple(_step(family, spec, tp, item, kv_item, hardware, batch, context) for batch in BATCHES),
    )


def _step(
    family: Family, spec: ModelSpec, tp: int, item: int, kv_item: int, hardware: Hardware, batch: int, context: int
) -> StepTime:
    read = _elements_read(family, spec, Shard(0, tp), batch) * item
    kv = batch * context * kv_bytes_per_token(spec, Shard(0, tp), kv_item)
    collectives = 0.0
    if tp > 1:
        # Two sums a layer in fp32 and the embedding's rows travel whole; of the logits each rank sends its shard.
        hidden = batch * spec.hidden_size * 4 * (tp - 1) / tp
        logits = batch * spec.vocab_size * 4 * (tp - 1) / tp
        count = 2 * spec.num_layers + 1
        collectives = (count + 1) * hardware.link_latency + (count * hidden + logits) / hardware.link_bandwidth
    return StepTime(
        batch,
        context,
        1e3 * read / hardware.memory_bandwidth,
        1e3 * kv / hardware.memory_bandwidth,
        1e3 * collectives,
    )


def _elements_read(family: Family, spec: ModelSpec, shard: Shard, batch: int) -> float:
    """Weights that a step reads: not the embedding beyond its rows, and of a mixture the experts that are chosen."""
    held: float = count_parameters(family, spec, shard)
    if not spec.tied_head:
        held -= len(shard.vocabulary(spec.vocab_size)) * spec.hidden_size
    if spec.moe is not None:
        each = 3 * spec.hidden_size * len(shard.part(spec.intermediate_size))
        share = spec.moe.experts_per_token / spec.moe.num_experts
        unread = spec.moe.num_experts * (1 - share) ** batch
        held -= spec.num_layers * unread * each
    return held


def table(plan: Plan, hardware: Hardware) -> str:
    """The plan for people: memory as a bar, figures, sequences that fit, step times as bars of their parts."""
    memory = hardware.memory_bytes * hardware.utilisation
    bar = _bar(((plan.largest_weight_bytes, "W"), (plan.pool_bytes, "k")), memory)
    lines = [
        f"{plan.family}, {plan.parameters / 1e9:.2f} B parameters, tp {plan.tp}",
        f"  weights a rank       {plan.weight_bytes / GIB:8.2f} GiB (largest {plan.largest_weight_bytes / GIB:.2f})",
        f"  KV a token           {plan.kv_bytes_per_token:8,} B, {plan.kv_bytes_per_token_rank:,} B a rank",
        f"  pool a rank          {plan.pool_bytes / GIB:8.2f} GiB = {plan.pool_tokens:,} tokens",
        f"  memory               [{bar}] W weights, k KV",
        "",
        "  length     sequences that fit",
        *(f"  {length:>7,}   {count:10.2f}" for length, count in plan.sequences.items()),
        "",
        f"  decode step at {plan.steps[0].context:,} tokens of context, floor in ms (W weights, k KV, c collectives)",
        "  batch   weights       KV    links    total     tok/s",
    ]
    slowest = max(step.total_ms for step in plan.steps)
    for step in plan.steps:
        parts = ((step.weights_ms, "W"), (step.kv_ms, "k"), (step.collectives_ms, "c"))
        lines.append(
            f"  {step.batch:5d}  {step.weights_ms:8.2f} {step.kv_ms:8.2f} {step.collectives_ms:8.2f} "
            f"{step.total_ms:8.2f} {step.tokens_per_s:9,.0f}  {_bar(parts, slowest).rstrip()}"
        )
    return "\n".join(lines)


def _bar(parts: tuple[tuple[float, str], ...], whole: float, width: int = 40) -> str:
    drawn = "".join(mark * max(size > 0, round(width * size / whole)) for size, mark in parts)
    return drawn[:width].ljust(width)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lockstep-plan", description="Memory and decode speed of a model, on paper.")
    parser.add_argument("config", type=Path, help="config.json or a snapshot folder")
    parser.add_argument("--device-memory", type=float, required=True, metavar="GiB")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--util", type=float, default=0.9, help="share of the device's memory that may be used")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(ITEM_BYTES))
    parser.add_argument("--kv-dtype", choices=sorted(ITEM_BYTES))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool", type=float, metavar="GiB", help="free pool of a rank, where it is known")
    parser.add_argument("--context", type=int, default=4096, help="tokens a sequence holds in the step times")
    parser.add_argument("--memory-bandwidth", type=float, default=4250.0, metavar="GB/s")
    parser.add_argument("--link-bandwidth", type=float, default=400.0, metavar="GB/s")
    parser.add_argument("--link-latency", type=float, default=10.0, metavar="us")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (args.device_memory > 0 and 0 < args.util <= 1 and args.block_size > 0 and args.context > 0):
        parser.error("--device-memory, --block-size and --context must be positive, --util within (0, 1]")
    if min(args.memory_bandwidth, args.link_bandwidth) <= 0 or args.link_latency < 0:
        parser.error("bandwidths must be positive, --link-latency at least 0")
    hardware = Hardware(
        args.device_memory * GIB,
        args.util,
        args.memory_bandwidth * 1e9,
        args.link_bandwidth * 1e9,
        args.link_latency * 1e-6,
    )
    path = args.config / "config.json" if args.config.is_dir() else args.config
    try:
        plan = make_plan(
            read_json(path),
            hardware,
            tp=args.tp,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            block_size=args.block_size,
            pool_bytes=None if args.pool is None else args.pool * GIB,
            context=args.context,
        )
    except ModelRefused as refusal:
        sys.exit("\n".join(f"lockstep-plan: {violation}" for violation in refusal.violations))
    print(json.dumps(plan.as_json(), indent=2) if args.json else table(plan, hardware))


if __name__ == "__main__":
    main()
