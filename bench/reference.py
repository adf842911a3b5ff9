"""A decoder in plain fp32 torch, dense or a mixture of experts, as the reference that greedy ids are held against.

Knows the random weights of `worker_svc.loading.random_weights` (or a checkpoint's tensors) by their names, and
nothing of the engine's layers. The question it answers is teacher-forced: given the ids so far, which id is the
likeliest, and by how much? An engine in bf16 should differ only where the two likeliest logits are within two bf16
steps of each other; a random model of many layers amplifies roundings, so a plain bf16 pass of torch says how often
that fails by itself.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Weights = Callable[[str, tuple[int, ...]], Tensor]


def weights_of(folder: Path, config: dict[str, Any], device: torch.device) -> Weights:
    """A function from (name, shape) to the tensor in fp32."""
    files = list(folder.glob("*.safetensors"))
    if files:
        from safetensors import safe_open

        where = {name: file for file in files for name in safe_open(file, "pt").keys()}
        return lambda name, shape: safe_open(where[name], "pt").get_tensor(name).to(device, torch.float32)
    from worker_svc.loading.random_weights import draw

    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return lambda name, shape: draw(name, shape, 0, device, widened=name == head).float()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def feed(config: dict[str, Any], weights: Weights, prefix: str, y: Tensor) -> Tensor:
    """A gated feed-forward layer, or one expert."""
    c, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    gate, up = (weights(f"{prefix}{n}_proj.weight", (inner, c)) for n in ("gate", "up"))
    down = weights(f"{prefix}down_proj.weight", (c, inner))
    return (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T


def mixture(config: dict[str, Any], weights: Weights, prefix: str, y: Tensor) -> Tensor:
    """Softmax over all experts in fp32, the likeliest few, their answers weighed and added in fp32."""
    router = weights(f"{prefix}gate.weight", (config["num_experts"], config["hidden_size"]))
    chance = (y.float() @ router.float().T).softmax(-1)
    ordered = torch.sort(chance, dim=-1, descending=True, stable=True)
    ids, share = (t[:, : config["num_experts_per_tok"]] for t in (ordered.indices, ordered.values))
    if config.get("norm_topk_prob"):
        share = share / share.sum(-1, keepdim=True)
    total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
    for expert in range(config["num_experts"]):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        answer = feed(config, weights, f"{prefix}experts.{expert}.", y[token])
        total.index_add_(0, token, answer.float() * share[token, slot, None])
    return total.to(y.dtype)


@torch.inference_mode()
def logits(
    config: dict[str, Any], source: Weights, ids: list[list[int]], device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """[len(ids[i]), vocabulary] of each sequence in fp32; layers are drawn once and used for all.

    dtype: of weights and of what layers hand on; sums are in fp32 either way.
    """

    def weights(name: str, shape: tuple[int, ...]) -> Tensor:
        return source(name, shape).to(dtype)

    c, v = config["hidden_size"], config["vocab_size"]
    heads, kv, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    d = config.get("head_dim") or c // heads
    table = weights("model.embed_tokens.weight", (v, c))
    xs = [table[torch.tensor(row, device=device)] for row in ids]
    if not config.get("tie_word_embeddings"):
        del table
    inverse = config["rope_theta"] ** -(torch.arange(0, d, 2, device=device, dtype=torch.float64) / d)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        qkv = [weights(f"{p}self_attn.{n}_proj.weight", (h * d, c)) for n, h in (("q", heads), ("k", kv), ("v", kv))]
        out = weights(f"{p}self_attn.o_proj.weight", (c, heads * d))
        full = config["model_type"] == "olmoe"
        q_norm, k_norm = (
            weights(f"{p}self_attn.{n}_norm.weight", (h * d if full else d,)) for n, h in (("q", heads), ("k", kv))
        )
        before, after = (weights(f"{p}{n}_layernorm.weight", (c,)) for n in ("input", "post_attention"))
        for i, x in enumerate(xs):
            n = len(x)
            angles = torch.arange(n, device=device, dtype=torch.float64)[:, None] * inverse
            cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
            y = norm(x, before, eps)
            q, k, v_ = (y @ w.T if full else (y @ w.T).view(n, -1, d) for w in qkv)
            q, k = norm(q, q_norm, eps), norm(k, k_norm, eps)
            q, k, v_ = (t.view(n, -1, d) for t in (q, k, v_))
            if config.get("clip_qkv") is not None:
                q, k, v_ = (t.clamp(-config["clip_qkv"], config["clip_qkv"]) for t in (q, k, v_))
            q, k = (
                torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(dtype)
                for a, b in (t.chunk(2, -1) for t in (q, k))
            )
            k, v_ = (t.repeat_interleave(heads // kv, 1).transpose(0, 1) for t in (k, v_))
            scores = q.transpose(0, 1) @ k.transpose(1, 2) * d**-0.5
            hidden = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
            weight = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(dtype)
            mixed = (weight @ v_).transpose(0, 1).reshape(n, -1)
            xs[i] = x + mixed @ out.T
        y = norm(torch.cat(xs), after, eps)
        update = (
            mixture(config, weights, f"{p}mlp.", y) if "num_experts" in config else feed(config, weights, f"{p}mlp.", y)
        )
        xs = [x + part for x, part in zip(xs, update.split([len(x) for x in xs]), strict=True)]
    final = weights("model.norm.weight", (c,))
    head = table if config.get("tie_word_embeddings") else weights("lm_head.weight", (v, c))
    return [norm(x, final, eps).float() @ head.float().T for x in xs]


def check_greedy(folder: Path, answers: list[tuple[list[int], list[int]]], device: str) -> dict[str, Any]:
    """How many ids are the reference's, differ where its first two logits are close, and are wrong.

    `bf16_wrong` is the same count for a plain bf16 pass in torch: what rounding alone does.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    config = json.loads((folder / "config.json").read_text())
    where = torch.device(device)
    source = weights_of(folder, config, where)
    ids = [prompt + out[:-1] for prompt, out in answers]
    exact = [
        row[len(prompt) - 1 :].cpu()
        for (prompt, _), row in zip(answers, logits(config, source, ids, where, torch.float32), strict=True)
    ]
    rough = [
        row[len(prompt) - 1 :].argmax(-1).tolist()
        for (prompt, _), row in zip(answers, logits(config, source, ids, where, torch.bfloat16), strict=True)
    ]
    counts = {"checked": 0, "equal": 0, "close": 0, "wrong": 0, "bf16_wrong": 0}
    gaps, wrong_gaps = [], []
    for (_, out), row, control in zip(answers, exact, rough, strict=True):
        top = row.topk(2, -1)
        for token, bf16_token, values, two in zip(out, control, top.values, top.indices, strict=True):
            gap = float(values[0] - values[1])
            step = 2.0 ** (torch.frexp(values[0].abs())[1].item() - 8)  # of a bf16 number of this size
            gaps.append(gap / step)
            kind = "equal" if token == int(two[0]) else "close" if gap < 2 * step else "wrong"
            if kind == "wrong":
                wrong_gaps.append(round(gap / step, 2))
            counts["checked"] += 1
            counts[kind] += 1
            counts["bf16_wrong"] += bf16_token != int(two[0]) and gap >= 2 * step
    return counts | {"median_gap_in_bf16_steps": round(sorted(gaps)[len(gaps) // 2], 2), "wrong_gaps": wrong_gaps}
