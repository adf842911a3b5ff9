"""From Python values to a GenerateRequest.

Knows the wire's fields and which of them belong to sampling; does not judge values (the server does, by one set of
rules for every client), except those that the wire cannot carry at all.
Invariant: absent stays absent; only what the caller gave is set.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from client.errors import InvalidRequest
from protos import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that go through the model's own chat template, on the server: {"role": ..., "content": ...}."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool | None = None


Prompt = str | Sequence[int] | Chat


class Options(TypedDict, total=False):
    """Everything a request can say beside its prompt; docs/api.md has the rule of every field."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    logprob_mode: Literal["tempered", "raw"]
    prompt_logprobs: int
    return_logits: bool
    request_id: str
    priority: int
    tenant: str
    cache_salt: str
    expected_fingerprint: str
    timeout_s: float  # a total deadline, over every attempt


_OF_REQUEST = ("request_id", "priority", "tenant", "cache_salt", "expected_fingerprint")


def build(prompt: Prompt, **options: Unpack[Options]) -> pb.GenerateRequest:
    """A request with an id of its own. Raises InvalidRequest naming a field that the wire cannot carry."""
    request = pb.GenerateRequest(request_id=options.get("request_id") or uuid.uuid4().hex)
    _set_prompt(request, prompt)
    for name, value in options.items():
        if value is None or name == "request_id":
            continue
        try:
            _set(request, name, value)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidRequest(f"{name}: {error}", "INVALID_ARGUMENT", {name: str(error)}) from None
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    try:
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, Chat):
            request.chat.SetInParent()
            for message in prompt.messages:
                request.chat.messages.add(role=message["role"], content=message["content"])
            if prompt.add_generation_prompt is not None:
                request.chat.add_generation_prompt = prompt.add_generation_prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        raise InvalidRequest(f"prompt: {error}", "INVALID_ARGUMENT", {"prompt": str(error)}) from None


def _set(request: pb.GenerateRequest, name: str, value: Any) -> None:
    sampling = request.sampling
    if name in _OF_REQUEST:
        setattr(request, name, value)
    elif name == "timeout_s":
        request.timeout_ms = max(1, round(value * 1000))
    elif name == "logit_bias":
        for token_id, bias in value.items():
            sampling.logit_bias[int(token_id)] = bias
    elif name == "logprob_mode":
        sampling.logprob_mode = pb.LogprobMode.Value(f"LOGPROB_MODE_{value.upper()}")  # type: ignore[assignment]
    elif name == "stop":
        sampling.stop.extend([value] if isinstance(value, str) else value)
    elif isinstance(getattr(sampling, name), (bool, int, float)):
        setattr(sampling, name, value)
    else:
        getattr(sampling, name).extend(value)
