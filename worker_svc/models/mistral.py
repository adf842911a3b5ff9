"""Mistral 7B v0.1 (sliding window) to v0.3, Nemo (head_dim apart from hidden / heads)."""

from worker_svc.layers.mlp import GatedMLP
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.spec import Config, ModelSpec


def read(config: Config) -> ModelSpec:
    window = 0 if config.get("sliding_window") is None else config.integer("sliding_window")
    return read_dense(config, window=window)


FAMILY = Family("MistralForCausalLM", "mistral", read, GatedMLP)
