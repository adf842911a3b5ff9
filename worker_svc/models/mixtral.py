"""Mixtral: Mistral's attention, every layer a mixture whose chosen experts share a weight of one."""

import functools

from worker_svc.layers.moe import ExpertNames, MixtureOfExperts
from worker_svc.models.decoder import Family
from worker_svc.models.dense import read_dense
from worker_svc.spec import Config, ModelSpec, MoeSpec

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def read(config: Config) -> ModelSpec:
    window = 0 if config.get("sliding_window") is None else config.integer("sliding_window")
    moe = MoeSpec(config.integer("num_local_experts"), config.integer("num_experts_per_tok"), renormalise=True)
    return read_dense(config, window=window, moe=moe)


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    read,
    functools.partial(MixtureOfExperts, names=NAMES),
    feed_forward_prefix="block_sparse_moe.",
)
