"""OLMoE: a mixture without renormalisation, q and k normed over their full width, optionally clipped."""

from worker_svc.layers.moe import MixtureOfExperts
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.spec import Config, ModelSpec, MoeSpec


def read(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    moe = MoeSpec(config.integer("num_experts"), config.integer("num_experts_per_tok"), config.flag("norm_topk_prob"))
    clip = None if config.get("clip_qkv") is None else config.number("clip_qkv")
    return read_dense(config, qk_norm="full", clip_qkv=clip, moe=moe, qkv_bias=bias, output_bias=bias)


FAMILY = Family("OlmoeForCausalLM", "olmoe", read, MixtureOfExperts)
