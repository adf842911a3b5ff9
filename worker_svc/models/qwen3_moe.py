"""Qwen3-MoE: Qwen3's attention, every layer a mixture."""

from worker_svc.layers.moe import MixtureOfExperts
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.models.qwen2 import read_window
from worker_svc.spec import Config, ModelSpec, MoeSpec


def read(config: Config) -> ModelSpec:
    config.must_be("decoder_sparse_step", 1)
    config.must_be("mlp_only_layers", [])
    bias = config.flag("attention_bias")
    experts = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    moe = MoeSpec(config.integer(experts), config.integer("num_experts_per_tok"), config.flag("norm_topk_prob"))
    return read_dense(
        config,
        window=read_window(config),
        qk_norm="head",
        moe=moe,
        intermediate_size=config.integer("moe_intermediate_size"),
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", read, MixtureOfExperts)
