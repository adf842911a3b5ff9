"""Self-attention of one layer: fused q, k, v rows split by head, output columns split by leaf."""

import functools
from collections.abc import Iterator

from torch import Tensor

from worker_svc.kv_cache import LayerCache
from worker_svc.layers.parameter import Parameter, Slice
from worker_svc.ops.base import HeadShape, Ops, QKNorm, Step, Update, Weight
from worker_svc.ops.leaves import leaf_part
from worker_svc.parallel.group import Group
from worker_svc.spec import ModelSpec, Shard


class Attention:
    """Args:
    prefix: of the checkpoint's names, e.g. "model.layers.0.self_attn.".
    """

    def __init__(self, spec: ModelSpec, shard: Shard, index: int, prefix: str) -> None:
        self._spec = spec
        self._prefix = prefix
        self._heads = shard.part(spec.num_heads)
        self._kv_heads = shard.kv_heads(spec.num_kv_heads)
        self._leaves = leaf_part(spec.leaves, shard.rank, shard.tp)
        if spec.qk_norm == "full":
            self._norm_leaves = leaf_part(spec.norm_leaves, shard.rank, shard.tp)
            self._full_norm: QKNorm
        self.shape = HeadShape(len(self._heads), len(self._kv_heads), spec.head_dim, spec.windows[index])
        self.qkv: Weight = None
        self.output: Weight = None
        self.norm: QKNorm | None = None
        self._norms: dict[str, Tensor] = {}
        self._qkv_bias: Tensor | None = None
        self._output_bias: Tensor | None = None

    def parameters(self) -> Iterator[Parameter]:
        spec, prefix = self._spec, self._prefix
        e = spec.head_dim
        q, kv = self._rows(self._heads), self._rows(self._kv_heads)
        columns = (("q_proj", spec.q_size, q), ("k_proj", spec.kv_size, kv), ("v_proj", spec.kv_size, kv))
        if spec.qkv_bias:
            biases = tuple(Slice(f"{prefix}{name}.bias", (size,), rows) for name, size, rows in columns)
            yield Parameter(biases, lambda ops, t: setattr(self, "_qkv_bias", t))
        if spec.output_bias:
            bias = Slice(f"{prefix}o_proj.bias", (spec.hidden_size,), range(spec.hidden_size))
            yield Parameter((bias,), lambda ops, t: setattr(self, "_output_bias", t))
        if spec.qk_norm != "none":
            full = spec.qk_norm == "full"
            for name, size, rows in (("q_norm", spec.q_size, q), ("k_norm", spec.kv_size, kv)):
                part = Slice(f"{prefix}{name}.weight", (size if full else e,), rows if full else range(e))
                yield Parameter((part,), functools.partial(self._bind_norm, name))
        weights = tuple(Slice(f"{prefix}{name}.weight", (size, spec.hidden_size), rows) for name, size, rows in columns)
        yield Parameter(weights, lambda ops, t: setattr(self, "qkv", ops.prepare_column(t, self._qkv_bias)))
        output = Slice(f"{prefix}o_proj.weight", (spec.hidden_size, spec.q_size), q, dim=1)
        yield Parameter(
            (output,), lambda ops, t: setattr(self, "output", ops.prepare_row(t, self._output_bias, self._leaves))
        )

    def forward(self, ops: Ops, x_TD: Tensor, cache: LayerCache, step: Step, group: Group) -> Update:
        qkv = ops.linear(x_TD, self.qkv)
        if self._spec.qk_norm == "full":
            # OLMoE: queries and keys are normed over their full width, which the ranks share.
            qkv = ops.full_norms(qkv, self._full_norm, self.shape, self._norm_leaves, group)
        queries = ops.qkv_rope_write(qkv, self.norm, self._spec.clip_qkv, self.shape, cache, step)
        return ops.row_linear(ops.attention(queries, self.shape, cache, step), self.output, group)

    def _bind_norm(self, name: str, ops: Ops, weight: Tensor) -> None:
        self._norms[name] = weight
        if len(self._norms) == 2:
            norm = QKNorm(self._norms["q_norm"], self._norms["k_norm"], self._spec.norm_eps)
            if self._spec.qk_norm == "full":
                self._full_norm = norm
            else:
                self.norm = norm

    def _rows(self, heads: range) -> range:
        return range(heads.start * self._spec.head_dim, heads.stop * self._spec.head_dim)
