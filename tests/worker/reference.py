"""An independent decoder in fp64, written from the raw weights of a snapshot: no paging, no shards, no fused weights.

Rotary tables are the worker's own fp32 ones, since their rounding is part of the model; `test_rope.py` holds those
against transformers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from worker_svc.layers import rope
from worker_svc.models.load import read_spec


def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    """[T, V] in fp64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.double() for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
    spec = read_spec(config)[1]
    cos, sin = (t[: len(tokens)].double() for t in rope.tables(spec.rope, spec.head_dim, len(tokens)))
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        y = _norm(x, weights[at + "input_layernorm.weight"], spec.norm_eps)
        x = x + _attention(y, weights, at + "self_attn.", spec, cos, sin, spec.windows[i])
        y = _norm(x, weights[at + "post_attention_layernorm.weight"], spec.norm_eps)
        x = x + (_mlp(y, weights, at + "mlp.") if spec.moe is None else _moe(y, weights, at, spec))
    x = _norm(x, weights["model.norm.weight"], spec.norm_eps)
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _attention(
    x: Tensor, weights: dict[str, Tensor], at: str, spec: Any, cos: Tensor, sin: Tensor, window: int
) -> Tensor:
    q, k, v = (_linear(x, weights, f"{at}{n}_proj") for n in "qkv")
    if spec.qk_norm == "full":
        q, k = (_norm(t, weights[f"{at}{n}_norm.weight"], spec.norm_eps) for t, n in ((q, "q"), (k, "k")))
    if spec.clip_qkv is not None:
        q, k, v = (t.clamp(-spec.clip_qkv, spec.clip_qkv) for t in (q, k, v))
    q, k, v = (t.view(len(x), -1, spec.head_dim) for t in (q, k, v))
    if spec.qk_norm == "head":
        q, k = (_norm(t, weights[f"{at}{n}_norm.weight"], spec.norm_eps) for t, n in ((q, "q"), (k, "k")))
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    out = []
    for head in range(spec.num_heads):
        kv = head * spec.num_kv_heads // spec.num_heads
        scores = q[:, head] @ k[:, kv].T / spec.head_dim**0.5
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (distance < 0) | ((distance >= window) if window else False)
        out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, kv])
    return _linear(torch.cat(out, -1), weights, at + "o_proj")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _mlp(
    x: Tensor, weights: dict[str, Tensor], at: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Tensor:
    gate, up, down = (weights[f"{at}{name}.weight"] for name in names)
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(x: Tensor, weights: dict[str, Tensor], at: str, spec: Any) -> Tensor:
    at += "block_sparse_moe." if f"{at}block_sparse_moe.gate.weight" in weights else "mlp."
    names = ("w1", "w3", "w2") if "block_sparse" in at else ("gate_proj", "up_proj", "down_proj")
    probabilities = (x @ weights[f"{at}gate.weight"].T).softmax(-1)
    out = []
    for row, p in zip(x, probabilities, strict=True):
        chosen = sorted(range(len(p)), key=lambda e: (-float(p[e]), e))[: spec.moe.experts_per_token]
        share = p[chosen] / p[chosen].sum() if spec.moe.renormalise else p[chosen]
        out.append(sum(s * _mlp(row, weights, f"{at}experts.{e}.", names) for e, s in zip(chosen, share, strict=True)))
    return torch.stack(out)
