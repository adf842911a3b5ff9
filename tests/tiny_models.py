"""Tiny random models as ordinary snapshots: transformers' own classes, weights and file layout.

    make_tiny(folder, "qwen3", num_attention_heads=6)   config, safetensors and a byte-level tokenizer in `folder`

Shapes are awkward on purpose (odd vocabulary, grouped heads, head_dim apart from hidden / heads) and divide by 4 ranks.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|bos|>' + m['role'] + '\n' + m['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)
BASE: dict[str, Any] = dict(
    vocab_size=385,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=258,
    initializer_range=0.2,  # the default 0.02 makes every prompt's continuation one repeated token
)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(head_dim=16, sliding_window=None)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=16)),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=64),
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=8, num_experts_per_tok=2)),
}


def make_tiny(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    chat: bool = True,
    **overrides: Any,
) -> Path:
    """Write a snapshot and return its folder. `overrides` are config fields. Biases are drawn like weights."""
    folder = Path(folder)
    config_name, model_name, differences = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**BASE, **differences, **overrides})
    config.dtype = dtype
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    _tokenizer(config.vocab_size, chat).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in fields.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def _tokenizer(vocab_size: int, chat: bool) -> PreTrainedTokenizerFast:
    """A token a byte, special tokens from 256, and names for the rest."""
    alphabet = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    vocabulary = {symbol: index for symbol, index in alphabet.items() if index < vocab_size}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for index, token in enumerate((BOS, EOS, PAD), 256) if index < vocab_size]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(f"<{i}>", normalized=False) for i in range(259, vocab_size)])
    named = dict(zip(("bos_token", "eos_token", "pad_token"), special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_symbols() -> list[str]:
    """The byte-level alphabet in byte order, so that a token id below 256 is its byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]
