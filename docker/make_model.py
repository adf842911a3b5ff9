"""Makes a random model that two workers can share: `python docker/make_model.py FOLDER`.

SmolLM2 has 9 heads and divides by 3. This one has 8, so that the composed cluster (tp=2) runs without any weights from
elsewhere; it speaks nonsense in SmolLM2's tokens. Needs the extra `demo`.
"""

import os
import shutil
import sys
from pathlib import Path

import torch

from worker_svc.loading import demo_model


def make(folder: Path) -> None:
    """Write the snapshot, unless it is there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "model.safetensors").exists():
        return
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model.ensure() / name, scratch / name)
    for path in scratch.iterdir():
        path.chmod(0o644)  # a container reads it as another user
    scratch.chmod(0o755)
    scratch.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
