"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from worker_svc.layers.mlp import GatedMLP
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.spec import Config, ModelSpec


def read(config: Config) -> ModelSpec:
    return read_dense(config, window=read_window(config), qkv_bias=True)


def read_window(config: Config) -> int:
    """Qwen configs name a window even where `use_sliding_window` is false; `layer_types` says which layers have it."""
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return 0
    if config.get("layer_types") is None:
        config.refuse("use_sliding_window without layer_types is not supported")
    return config.integer("sliding_window")


FAMILY = Family("Qwen2ForCausalLM", "qwen2", read, GatedMLP)
