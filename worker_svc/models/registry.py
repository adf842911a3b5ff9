"""Which architecture name is which family."""

from worker_svc.models import llama, mistral, mixtral, olmoe, qwen2, qwen3, qwen3_moe
from worker_svc.models.decoder import Family
from worker_svc.spec import Config, ModelRefused

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (llama, mistral, qwen2, qwen3, olmoe, qwen3_moe, mixtral)
}


def family_of(config: Config) -> Family:
    """By `architectures`, or by `model_type` where that is absent. Raises ModelRefused, naming what is supported."""
    named = config.get("architectures") or []
    if not named:
        by_type = {family.model_type: family for family in FAMILIES.values()}
        if config.get("model_type") in by_type:
            return by_type[config.get("model_type")]
    for name in named:
        if name in FAMILIES:
            return FAMILIES[name]
    asked = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
    raise ModelRefused([f"architecture {asked} is not supported; supported: {', '.join(sorted(FAMILIES))}"])
