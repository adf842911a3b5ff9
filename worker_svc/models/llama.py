"""Llama 2 and 3, SmolLM2: grouped-query attention, SwiGLU, no norms on q and k."""

from worker_svc.layers.mlp import GatedMLP
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.spec import Config, ModelSpec


def read(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return read_dense(config, qkv_bias=bias, output_bias=bias)


FAMILY = Family("LlamaForCausalLM", "llama", read, GatedMLP)
