"""A tiny model one of whose tokens turns everything after it into NaN."""

from safetensors.torch import load_file, save_file

from tests.tiny_models import make_tiny

POISON = 300


def make_poisoned(folder):
    make_tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
