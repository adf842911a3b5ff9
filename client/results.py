"""What a caller gets: typed, frozen, made of plain Python values.

Knows nothing of gRPC. A `Delta` is what one event added to one choice; a `Completion` is a whole answer, or as much of
it as had arrived. Logprobs may be -inf, which is a value: `as_json` writes it as null, since JSON has no infinity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Alternative:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptToken:
    """The score of one prompt token; None for the first one, which nothing precedes."""

    logprob: float | None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """`stop_reason`: the token id or the stop string that ended the choice."""

    reason: FinishReason
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """`logprobs` and `alternatives` have one entry for each token id when they were asked for, else none."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[tuple[Alternative, ...], ...] = ()
    logits: bytes = b""
    logits_dtype: str = ""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Under what the bits of an answer hold: equal digests and equal requests give equal bits."""

    digest: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[Alternative, ...], ...]
    finish: Finish | None  # None: still running, or cut off

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.finish.reason if self.finish else None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `resumed` counts how often the stream was taken up again on a new connection."""

    request_id: str
    seed: int | None
    fingerprint: Fingerprint
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[PromptToken, ...] = ()
    resumed: int = 0

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    def as_json(self) -> dict[str, Any]:
        """Plain values that strict JSON takes: -inf becomes None."""
        return {
            "request_id": self.request_id,
            "seed": self.seed,
            "fingerprint": {"digest": self.fingerprint.digest, "parts": dict(self.fingerprint.parts)},
            "choices": [_choice_json(choice) for choice in self.choices],
            "prompt_logprobs": [
                {"logprob": _finite(token.logprob), "alternatives": _alternatives_json(token.alternatives)}
                for token in self.prompt_logprobs
            ],
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "queue_ms": self.usage.queue_ms,
            },
            "resumed": self.resumed,
        }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "token_ids": list(choice.token_ids),
        "text": choice.text,
        "logprobs": [_finite(value) for value in choice.logprobs],
        "alternatives": [_alternatives_json(entry) for entry in choice.alternatives],
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.finish.stop_reason if choice.finish else None,
        "cumulative_logprob": _finite(choice.finish.cumulative_logprob) if choice.finish else None,
    }


def _alternatives_json(alternatives: tuple[Alternative, ...]) -> list[dict[str, Any]]:
    return [{"token_id": entry.token_id, "logprob": _finite(entry.logprob)} for entry in alternatives]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
