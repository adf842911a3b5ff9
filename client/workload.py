"""What a load test asks: a list of requests, the same for everybody who is given the same file or seed.

Three sources: a workload file (bench/workloads/README.md has the format), JSON lines with prompts, random lengths.
Knows no server: prompt ids are folded into a smaller vocabulary when the caller says how large it is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from client.requests import Chat, Options, Prompt, build
from protos import generation_pb2 as pb

_PROMPT_IDS = (1000, 40000)  # the range of the workload format


class WorkloadError(Exception):
    """A file or a flag that makes no workload; the message names the line."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request. `arrival_s` is its offset from the start; 0 in sets that have no arrivals of their own."""

    id: str
    prompt: Prompt
    options: Options = field(default_factory=Options)
    arrival_s: float = 0.0

    def message(self, request_id: str) -> pb.GenerateRequest:
        """In the wire's form."""
        options = dict(self.options)
        options["request_id"] = request_id
        return build(self.prompt, **options)  # type: ignore[arg-type]


def prompt_ids(seed: int, length: int) -> list[int]:
    """The ids that the workload format stands for."""
    ids: list[int] = np.random.default_rng(seed).integers(*_PROMPT_IDS, length).tolist()
    return ids


def load(path: Path, common: Options) -> list[Item]:
    """Every line of a file; what a line says goes before `common`. Raises WorkloadError."""
    items: list[Item] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            items.append(_item(entry, len(items), common))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkloadError(f"{path}:{number}: {error!r}") from None
    if not items:
        raise WorkloadError(f"{path} has no requests")
    return items


def _item(entry: Mapping[str, Any], index: int, common: Options) -> Item:
    known = {"id", "arrival_s", "prompt_seed", "prompt_len", "prompt", "prompt_ids", "token_ids", "messages"}
    options: Any = {**common, **{name: value for name, value in entry.items() if name in Options.__annotations__}}
    unknown = sorted(set(entry) - known - set(Options.__annotations__))
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}")
    prompt: Prompt
    if "prompt_seed" in entry:
        prompt = prompt_ids(entry["prompt_seed"], entry["prompt_len"])
        options.setdefault("ignore_eos", True)  # the format's rule
        options.setdefault("temperature", 0.6)
    elif "messages" in entry:
        prompt = Chat(entry["messages"])
    elif "prompt" in entry:
        prompt = entry["prompt"] if isinstance(entry["prompt"], str) else list(entry["prompt"])
    else:
        prompt = list(entry["prompt_ids"] if "prompt_ids" in entry else entry["token_ids"])
    return Item(str(entry.get("id", index)), prompt, options, float(entry.get("arrival_s", 0.0)))


def random_items(
    num: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int, common: Options
) -> list[Item]:
    """`num` requests whose lengths are uniform in the two closed intervals; end-of-sequence is ignored."""
    random = np.random.default_rng(seed)
    inputs = random.integers(input_len[0], input_len[1] + 1, num)
    outputs = random.integers(output_len[0], output_len[1] + 1, num)
    items = []
    for index in range(num):
        ids = random.integers(*_PROMPT_IDS, int(inputs[index])).tolist()
        options: Any = {"ignore_eos": True, "seed": index, "temperature": 0.6, **common}
        options["max_tokens"] = int(outputs[index])
        items.append(Item(str(index), ids, options))
    return items


def folded(items: Sequence[Item], vocab_size: int) -> tuple[list[Item], int]:
    """The items with prompt ids inside a vocabulary; how many had to be changed."""
    changed, result = 0, []
    for item in items:
        if isinstance(item.prompt, list) and item.prompt and max(item.prompt) >= vocab_size:
            changed += 1
            item = replace(item, prompt=[token % vocab_size for token in item.prompt])
        result.append(item)
    return result, changed


def interval(text: str) -> tuple[int, int]:
    """'A:B' or 'A'. Raises WorkloadError."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise WorkloadError(f"{text!r} is not A:B") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise WorkloadError(f"{text!r}: lengths are at least 1 and ascend")
    return bounds
