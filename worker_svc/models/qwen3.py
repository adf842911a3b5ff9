"""Qwen3 dense: per-head norms on q and k, head_dim apart from hidden / heads, no biases."""

from worker_svc.layers.mlp import GatedMLP
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.models.qwen2 import read_window
from worker_svc.spec import Config, ModelSpec


def read(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return read_dense(config, window=read_window(config), qk_norm="head", qkv_bias=bias, output_bias=bias)


FAMILY = Family("Qwen3ForCausalLM", "qwen3", read, GatedMLP)
