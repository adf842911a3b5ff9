"""What dense families have in common in their configs."""

from dataclasses import replace
from typing import Any

from worker_svc.spec import Config, ModelSpec, read_rope


def read_dense(config: Config, *, window: int = 0, **differences: Any) -> ModelSpec:
    """A spec from the fields every Llama-like config has, with the family's differences. Raises ModelRefused."""
    config.must_be("hidden_act", "silu", "swish")
    config.must_be("mlp_bias", False)
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    hidden = config.integer("hidden_size")
    if heads % kv_heads:
        config.refuse(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if config.get("head_dim") is None and hidden % heads:
        config.refuse(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is absent")
    head_dim = config.integer("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        config.refuse(f"head_dim {head_dim} is odd, which rotary embedding cannot turn")
    layers = config.integer("num_hidden_layers")
    spec = ModelSpec(
        family=str(config.get("model_type", "")),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config),
        tied_head=config.flag("tie_word_embeddings"),
        windows=config.windows(layers, window),
        dtype=config.dtype(),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        eos_token_ids=config.ids("eos_token_id"),
    )
    moe = differences.get("moe")
    if moe is not None and moe.experts_per_token > moe.num_experts:
        config.refuse(f"num_experts_per_tok {moe.experts_per_token} of {moe.num_experts} experts")
    config.finish()
    return replace(spec, **differences)
