"""A decoder over shared layers: embedding, layers, final norm, head.

Knows the order of ops in a step, which every family shares. Does not know any family: each is a file beside this one
that reads its config and says what a layer is made of. No step in `forward` looks at data: all facts of a step are
tensors in `StepInputs` or decided before it, so the pass can be captured as a graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker_svc.kv_cache import KVCache, LayerCache
from worker_svc.layers import rope
from worker_svc.layers.attention import Attention
from worker_svc.layers.norm import Norm
from worker_svc.layers.parameter import Parameter
from worker_svc.layers.vocabulary import Vocabulary
from worker_svc.ops.base import Ops, Step, Update, Weight
from worker_svc.parallel.group import Group
from worker_svc.spec import Config, ModelSpec, Shard
from worker_svc.step_inputs import StepInputs


class FeedForward(Protocol):
    def parameters(self) -> Iterator[Parameter]: ...

    def add_norm(self, ops: Ops, update: Update, residual_TD: Tensor, norm: Norm) -> tuple[Any, Tensor]:
        """(norm(update + residual) in the form that `forward` reads, update + residual)."""
        ...

    def forward(self, ops: Ops, x_TD: Any, group: Group) -> Update: ...


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's file states. Names are the checkpoint's; `feed_forward_prefix` follows a layer's prefix."""

    architecture: str  # as in the config's `architectures`
    model_type: str
    read: Callable[[Config], ModelSpec]
    feed_forward: Callable[[ModelSpec, Shard, int, str], FeedForward]
    feed_forward_prefix: str = "mlp."


class DecoderLayer:
    def __init__(self, family: Family, spec: ModelSpec, shard: Shard, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.input_norm = Norm(f"{prefix}input_layernorm.weight", spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, shard, index, f"{prefix}self_attn.")
        self.middle_norm = Norm(f"{prefix}post_attention_layernorm.weight", spec.hidden_size, spec.norm_eps)
        self.feed_forward = family.feed_forward(spec, shard, index, prefix + family.feed_forward_prefix)

    def parameters(self) -> Iterator[Parameter]:
        for part in (self.input_norm, self.attention, self.middle_norm, self.feed_forward):
            yield from part.parameters()

    def forward(
        self, ops: Ops, x_TD: Tensor, residual_TD: Tensor, cache: LayerCache, step: Step, group: Group
    ) -> tuple[Update, Tensor]:
        """x is the residual, normed. The layer's last sum is still to be added: the next norm does that."""
        update = self.attention.forward(ops, x_TD, cache, step, group)
        normed, residual_TD = self.feed_forward.add_norm(ops, update, residual_TD, self.middle_norm)
        return self.feed_forward.forward(ops, normed, group), residual_TD


class Decoder:
    def __init__(self, family: Family, spec: ModelSpec, shard: Shard, ops: Ops) -> None:
        self.spec = spec
        self.shard = shard
        self.ops = ops
        self.vocabulary = Vocabulary(spec, shard, "model.embed_tokens.weight", "lm_head.weight")
        self.layers = [DecoderLayer(family, spec, shard, i) for i in range(spec.num_layers)]
        self.final_norm = Norm("model.norm.weight", spec.hidden_size, spec.norm_eps)
        self._rope: Weight = None
        self._num_positions = 0
        self._device = torch.device("cpu")
        self.bytes_read = 0  # from the snapshot, by whoever loaded it

    def parameters(self) -> Iterator[Parameter]:
        yield from self.vocabulary.parameters()
        for layer in self.layers:
            yield from layer.parameters()
        yield from self.final_norm.parameters()

    def reserve_positions(self, num_positions: int, device: torch.device | None = None) -> None:
        """Rotary tables for at least so many positions; grows, never shrinks."""
        self._device = device or self._device
        if num_positions > self._num_positions:
            cos, sin = rope.tables(self.spec.rope, self.spec.head_dim, num_positions)
            self._rope = self.ops.prepare_rope(cos.to(self._device), sin.to(self._device))
            self._num_positions = len(cos)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, cache: KVCache, group: Group) -> Tensor:
        """Final hidden states [T, D], normed; keys and values of the step's tokens are in the cache afterwards."""
        ops = self.ops
        self.reserve_positions(inputs.host.max_position + 1)
        step = ops.begin(inputs, cache, self._rope)
        residual = self.vocabulary.embed(ops, inputs.token_ids_T, group)
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        first = self.layers[0].input_norm
        x = ops.rms_norm(residual, first.weight, first.eps)
        for layer, layer_cache, norm in zip(self.layers, cache.layers, norms, strict=True):
            update, residual = layer.forward(ops, x, residual, layer_cache, step, group)
            x, residual = ops.add_rms_norm(update, residual, norm.weight, norm.eps)
        return x

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.inference_mode()
    def local_logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits of this rank's ids, [R, local], from `vocabulary.first_id`; perhaps none."""
        return self.vocabulary.local_logits(self.ops, hidden_RD)

    @torch.inference_mode()
    def gather_logits(self, local_RL: Tensor, group: Group) -> Tensor:
        """[R, V] on every rank, from each rank's `local_logits`."""
        return self.vocabulary.gather(local_RL, group)

    def logits(self, hidden_RD: Tensor, group: Group) -> Tensor:
        """[R, V] in fp32 (fp64 for fp64 models), on every rank."""
        return self.gather_logits(self.local_logits(hidden_RD), group)
