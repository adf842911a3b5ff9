"""The experts of a mixture on this GPU: are they right, are their bits a token's own, and what does a layer take?

    python bench/moe_check.py --model bench/configs/olmoe-1b-7b

Random weights of one layer at the model's shapes, in bf16. Prints a line a check, `ok` or `FAILED`, then microseconds
of a layer in a CUDA graph, from o_proj's sum to the next layer's norm, in each form that its launches may take. Every
other launch reads other tokens, so at few rows other experts too: weights come from memory as in a step. Takes a
minute, most of it compilation.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from tune_cuda import graph_us  # noqa: E402

from worker_svc.cuda import moe, rows  # noqa: E402
from worker_svc.cuda.matmul import Tile  # noqa: E402
from worker_svc.models import check_snapshot  # noqa: E402
from worker_svc.spec import ModelSpec  # noqa: E402

TOKENS = 8192
EPSILON = 1e-5
FORMS = ("few", "many")  # how a layer's launches may be cut: `few` up to moe.NORM_ROWS tokens, `many` above
TILES = (
    Tile(16, 32, 128, 4, 4), Tile(16, 128, 64, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 8), Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8), Tile(128, 64, 64, 4, 4, group_m=1),
)  # fmt: skip


class Layer:
    def __init__(self, spec: ModelSpec) -> None:
        assert spec.moe is not None, "not a mixture of experts"
        self.moe, self.name = spec.moe, torch.cuda.get_device_name()
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int, scale: float = 0.02) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale, generator=generator)

        experts, width, inner = spec.moe.num_experts, spec.hidden_size, spec.intermediate_size
        self.x = draw(TOKENS, width, scale=1.0)
        self.router = draw(experts, width)
        self.gate_up, self.down = draw(experts, 2 * inner, width), draw(experts, width, inner)
        self.experts = moe.prepare(self.gate_up, self.down)
        self.scale = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def parts(self, x: Tensor, count: Tensor, *, dependent: bool = False) -> Tensor:
        return moe.logits(x, self.router, count, dependent=dependent)

    def route(
        self, x: Tensor, count: Tensor, *, dependent: bool = False, experts: moe.Experts | None = None,
        parts: Tensor | None = None, grouped: bool | None = None,
    ) -> moe.Routed:  # fmt: skip
        slots = self.moe.experts_per_token
        if grouped is None:
            grouped = moe.worth_grouping(len(x), slots, self.moe.num_experts)
        return moe.choose(
            self.parts(x, count, dependent=dependent) if parts is None else parts, slots,
            (experts or self.experts).counts, count, renormalise=self.moe.renormalise, grouped=grouped,
            dependent=dependent,
        )  # fmt: skip

    def route_as_a_step(
        self, x: Tensor, count: Tensor, *, dependent: bool = False, parts: Tensor | None = None
    ) -> moe.Routed:
        """As `CudaOps.moe`: gate and up choose the experts of pairs that are not grouped."""
        slots = self.moe.experts_per_token
        parts = self.parts(x, count, dependent=dependent) if parts is None else parts
        if moe.worth_grouping(len(x), slots, self.moe.num_experts):
            return self.route(x, count, dependent=dependent, parts=parts)
        return moe.left_to_experts(parts, slots, renormalise=self.moe.renormalise)

    def answers(self, x: Tensor, count: Tensor, *, tile: Tile | None = None, dependent: bool = False) -> moe.Answers:
        routed = self.route_as_a_step(x, count, dependent=dependent)
        tiles = None if tile is None else (tile, tile)
        return moe.answer(
            x, self.experts, routed, count, x.dtype, tiles=tiles, device_name=self.name, dependent=dependent
        )

    def add_norm(
        self, update: Tensor, residual: Tensor, count: Tensor, *, dependent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `CudaOps.add_rms_norm`: the residual is changed in place."""
        tokens, width = update.shape
        out = torch.empty_like(update)
        options: dict[str, bool] = {"launch_pdl": True} if dependent else {}
        rows.add_norm_kernel[(tokens,)](
            update, residual, residual, self.scale, out, count, width, EPSILON, ADD=True,
            BLOCK=1 << (width - 1).bit_length(),
            DEPENDENT=dependent, num_warps=rows.WARPS, **options,
        )  # fmt: skip
        return out, residual

    def step(self, update: Tensor, residual: Tensor, count: Tensor, form: str, *, dependent: bool) -> Tensor:
        """From o_proj's sum to the next layer's norm. form: one of FORMS. The residual may be changed in place."""
        if form == "few":
            normed, residual = moe.norm_logits(
                update, residual, self.scale, EPSILON, self.router, count, dependent=dependent
            )
            x, routed = normed.x_TD, self.route_as_a_step(update, count, dependent=dependent, parts=normed.parts)
        else:
            x, residual = self.add_norm(update, residual, count, dependent=dependent)
            routed = self.route(x, count, dependent=dependent)
        answers = moe.answer(x, self.experts, routed, count, x.dtype, device_name=self.name, dependent=dependent)
        return moe.combine_norm(answers, residual, self.scale, EPSILON, count, dependent=dependent)

    def run(self, x: Tensor, *, bucket: int = 0, tile: Tile | None = None, dependent: bool = False) -> Tensor:
        """[len(x), D] in fp32, in a bucket of at least len(x) tokens whose others are NaN."""
        padded = torch.full((max(bucket, len(x)), x.shape[1]), float("nan"), device="cuda", dtype=x.dtype)
        padded[: len(x)] = x
        count = number(len(x))
        answers = self.answers(padded, count, tile=tile, dependent=dependent)
        return moe.combine(answers, count, torch.float32, dependent=dependent)[: len(x)]

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(experts [T, S], gap between the last chosen and the first not chosen logit [T], sums [T, D]) in fp32."""
        slots = self.moe.experts_per_token
        logits = x.float() @ self.router.float().T
        ordered = torch.sort(logits, dim=-1, descending=True, stable=True)
        ids, gap = ordered.indices[:, :slots], ordered.values[:, slots - 1] - ordered.values[:, slots]
        weights = logits.softmax(-1).gather(1, ids)
        if self.moe.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros(x.shape, device="cuda")
        for expert in range(self.moe.num_experts):
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            gate, up = (x[token].float() @ self.gate_up[expert].float().T).chunk(2, 1)
            answer = (torch.nn.functional.silu(gate) * up) @ self.down[expert].float().T
            total.index_add_(0, token, answer * weights[token, slot, None])
        return ids, gap, total


def number(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device="cuda")


def check(layer: Layer) -> bool:
    passed = True

    def say(what: str, good: bool, more: object = "") -> None:
        nonlocal passed
        passed &= good
        print("ok    " if good else "FAILED", what, more, flush=True)

    x = layer.x
    whole = layer.run(x)
    ids, gap, want = layer.reference(x)
    routed = layer.route(x, number(TOKENS))
    layer.experts.counts.zero_()
    clear = gap > 1e-4
    same = (routed.ids == ids).all(1)
    say("experts are the reference's where logits differ", bool(same[clear].all()), f"{int(same.sum())} of {TOKENS}")
    error = float((whole[same] - want[same]).norm() / want[same].norm())
    say("sums are the reference's", error < 1e-2, f"relative error {error:.1e}")
    say("a wrong expert would be seen", float((whole - want.roll(1, 0)).norm() / want.norm()) > 0.5)
    say("the same again", all(torch.equal(layer.run(x), whole) for _ in range(3)))
    for tile in TILES:
        say(f"{tile}", torch.equal(layer.run(x, tile=tile), whole))
    for tokens in (1, 2, 3, 4, 5, 8, 16, 33, 64, 100, 128, 200, 256, 700):
        bucket = 1 << (tokens - 1).bit_length()
        firsts = range(0, TOKENS - tokens, TOKENS // 8)
        outs = [layer.run(x[f : f + tokens], bucket=bucket, dependent=tokens <= 128) for f in firsts]
        good = all(torch.equal(out, whole[f : f + tokens]) for f, out in zip(firsts, outs, strict=True))
        say(f"{tokens} tokens in a bucket of {bucket}", good)
    for tile in (*TILES[:4], replace(TILES[0], prefetch_k=512)):
        say(f"4 tokens, {tile}", torch.equal(layer.run(x[:4], tile=tile, dependent=True), whole[:4]))
    order = torch.randperm(TOKENS, device="cuda")
    say("another order", torch.equal(layer.run(x[order]), whole[order]))
    one = x[:1].expand(TOKENS, -1).contiguous()
    say("all tokens at the same experts", torch.equal(layer.run(one), whole[:1].expand(TOKENS, -1)))
    say("lists are empty afterwards", not layer.experts.counts.any())
    say("the next norm taken along", fused_is_both(layer, x[:100]))
    residual = x.flip(0).contiguous()
    want = layer.step(x, residual.clone(), number(TOKENS), "many", dependent=False)
    for tokens in (1, 2, 3, 4, 5, 8, 16, 32):
        for first in (0, 1000, TOKENS - tokens):
            own = slice(first, first + tokens)
            for form in ("few", "many"):
                for dependent in (False, True):
                    args = x[own].contiguous(), residual[own].clone(), number(tokens)
                    out = layer.step(*args, form, dependent=dependent)
                    if not torch.equal(out, want[own]):
                        say(f"{tokens} tokens from {first}, {form}, dependent {dependent}", False)
        say(f"{tokens} tokens, a layer in two forms", passed)
    return passed


def fused_is_both(layer: Layer, x: Tensor) -> bool:
    count = number(len(x))
    residual = torch.randn(x.shape, device="cuda").to(x.dtype)
    update = moe.combine(layer.answers(x, count), count, x.dtype)
    total = residual.clone()
    want, _ = layer.add_norm(update, total, count)
    got = moe.combine_norm(layer.answers(x, count), residual, layer.scale, EPSILON, count)
    return torch.equal(got, want) and torch.equal(total, residual)


def times(layer: Layer, tokens: int) -> dict[str, float]:
    """Microseconds a launch, alone in a graph, and of a layer from o_proj's sum to the next norm, in each form."""
    dependent, count = tokens <= 128, number(tokens)
    whole_parts = [part for part in layer.x.split(tokens) if len(part) == tokens]
    parts = whole_parts[:12] if len(whole_parts) > 1 else whole_parts * 3
    router_inner = layer.experts.down.shape[1]
    routings, hiddens = [], []
    for x in parts:
        own = replace(layer.experts, counts=torch.zeros_like(layer.experts.counts))
        routings.append((own, layer.route(x, count, experts=own)))
        hiddens.append(torch.randn(tokens * layer.moe.experts_per_token, router_inner, device="cuda").to(x.dtype))
    first, second = moe.tiles_of(layer.experts, routings[0][1], layer.name)
    outs = [torch.empty(len(h), x.shape[1], dtype=x.dtype, device="cuda") for h, x in zip(hiddens, parts, strict=True)]

    def launches(gated: bool) -> list[Callable[[], None]]:
        made: list[Callable[[], None]] = []
        for x, hidden, out, (own, routed) in zip(parts, hiddens, outs, routings, strict=True):
            a, w, o, tile = (x, own.gate_up, hidden, first) if gated else (hidden, own.down, out, second)
            made.append(
                lambda a=a, w=w, o=o, own=own, routed=routed, tile=tile: moe.product(  # type: ignore[misc]
                    a, w, o, own, routed, count, tile, gated=gated, dependent=dependent
                )
            )
        return made

    residuals = [torch.zeros_like(x) for x in parts]
    forms = [form for form in FORMS if form != "few" or tokens <= moe.NORM_ROWS]

    def layers(form: str) -> list[Callable[[], None]]:
        return [
            lambda x=x, r=r: layer.step(x, r, count, form, dependent=dependent)  # type: ignore[misc]
            for x, r in zip(parts, residuals, strict=True)
        ]

    taken: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(3):
        for form in forms:
            taken[form].append(graph_us(layers(form), 10))
    return {
        "tokens": tokens, "gate_up_us": graph_us(launches(True), 10), "down_us": graph_us(launches(False), 10),
        "layer_us": min(taken[forms[0]]), **{form: min(values) for form, values in taken.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4, 8, 16, 256, TOKENS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    layer = Layer(check_snapshot(options.model, weights=False).spec)
    with torch.inference_mode():
        passed = check(layer)
        timed = [times(layer, tokens) for tokens in options.tokens]
    expert_bytes = 2 * (layer.gate_up[0].numel() + layer.down[0].numel())
    for row in timed:
        pairs = row["tokens"] * layer.moe.experts_per_token
        touched = layer.moe.num_experts * (1 - (1 - 1 / layer.moe.num_experts) ** pairs)
        seconds = row["layer_us"] / 1e6
        forms = ", ".join(f"{form} {row[form]:.1f} us" for form in FORMS if form in row)
        print(
            f"{row['tokens']:5.0f} tokens: gate_up {row['gate_up_us']:7.1f} us, down {row['down_us']:7.1f} us, "
            f"layer: {forms} ({touched * expert_bytes / seconds / 1e12:.2f} TB/s of weights, "
            f"{pairs * expert_bytes / seconds / 1e12:.0f} TFLOP/s)",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps({"passed": passed, "times": timed}, indent=1) + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
