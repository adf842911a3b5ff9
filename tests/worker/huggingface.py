"""transformers as the oracle: logits and greedy continuations, one sequence at a time."""

import warnings
from pathlib import Path

import torch
import transformers


def load(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    plain = dict(attn_implementation="eager", experts_implementation="eager")  # grouped products know no fp64
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain).eval()


@torch.inference_mode()
def logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The loop is ours, so that no generation setting has a say."""
    past, given, out = None, torch.tensor([prompt]), []
    for _ in range(num_tokens):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the cache's argument is being renamed
            answer = model(given, past_key_values=past, use_cache=True)
            past = answer.past_key_values
        out.append(int(answer.logits[0, -1].argmax()))
        given = torch.tensor([[out[-1]]])
    return out
