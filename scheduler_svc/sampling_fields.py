"""The fields of SamplingParams, each read by presence and checked by its rule.

Presence is asked of every field and never guessed from its value, since absent and zero are different. What is wrong is
gathered, so that a caller hears of everything at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos import generation_pb2 as pb
from protos.step import Int32s, RowSampling
from scheduler_svc import limits


@dataclass(frozen=True, slots=True)
class Violation:
    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What validation must know. `eos_ids` is the union of config, generation config and tokenizer.

    `encode` and `render_chat` turn text and chat into token ids and raise ValueError with a reason for the caller;
    None: the scheduler has no tokenizer.
    """

    vocab_size: int
    max_seq_len: int
    eos_ids: frozenset[int]
    fingerprint: str
    encode: Callable[[str], list[int]] | None = None
    encode_chat: Callable[[Sequence[dict[str, str]], bool], list[int]] | None = None


@dataclass(slots=True)
class SamplingFields:
    """Reads sampling fields by presence and gathers what is wrong with them."""

    params: pb.SamplingParams
    facts: ModelFacts
    violations: list[Violation] = field(default_factory=list)

    def wrong(self, name: str, description: str) -> None:
        self.violations.append(Violation(f"sampling.{name}", description))

    def get(self, name: Any, default: Any) -> Any:
        return getattr(self.params, name) if self.params.HasField(name) else default

    def number(self, name: str, default: float, low: float, high: float, above: bool = False) -> float:
        """A finite float in [low, high], or in (low, high] with `above`."""
        value = float(self.get(name, default))
        if not (low < value if above else low <= value) or not value <= high or not math.isfinite(value):
            bracket, end = "(" if above else "[", ")" if math.isinf(high) else "]"
            self.wrong(name, f"must be in {bracket}{low:g}, {high:g}{end}, got {value:g}")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = int(self.get(name, default))
        if not low <= value <= high:
            self.wrong(name, f"must be in [{low}, {high}], got {value}")
        return value

    def alternatives(self, name: str) -> int | None:
        if not self.params.HasField(name):
            return None
        return self.integer(name, 0, 0, min(limits.MAX_ALTERNATIVES, self.facts.vocab_size))

    def ids(self, name: str) -> Int32s:
        """A list of token ids, each once, ascending."""
        listed = getattr(self.params, name)
        if len(listed) > limits.MAX_TOKEN_ID_LIST:
            self.wrong(name, f"at most {limits.MAX_TOKEN_ID_LIST} ids, got {len(listed)}")
            return np.array([], np.int32)
        column = np.unique(np.fromiter(listed, np.int64))
        outside = (column < 0) | (column >= self.facts.vocab_size)
        if outside.any():
            self.wrong(name, outside_vocabulary(int(column[outside.argmax()]), self.facts))
        return column.astype(np.int32)

    def token_counts(self, num_prompt: int, scores_prompt: bool) -> tuple[int, int]:
        """max_tokens and min_tokens."""
        room = self.facts.max_seq_len - num_prompt
        max_tokens = int(self.get("max_tokens", room))
        if max_tokens < 0:
            self.wrong("max_tokens", f"must not be negative, got {max_tokens}")
        elif max_tokens == 0 and not (scores_prompt and self.params.HasField("max_tokens")):
            if room == 0:
                self.wrong(
                    "max_tokens",
                    f"no room for output: the prompt has {num_prompt} tokens, the context is {self.facts.max_seq_len}",
                )
            else:
                self.wrong("max_tokens", "0 only scores the prompt and needs sampling.prompt_logprobs")
        elif max_tokens > room:
            self.wrong(
                "max_tokens",
                f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} are {num_prompt + max_tokens}, "
                f"the context is {self.facts.max_seq_len}",
            )
        min_tokens = int(self.get("min_tokens", 0))
        if min_tokens < 0:
            self.wrong("min_tokens", f"must not be negative, got {min_tokens}")
        elif min_tokens > max(max_tokens, 0):
            self.wrong("min_tokens", f"{min_tokens} is above max_tokens {max_tokens}")
        return max_tokens, min_tokens

    def stops(self) -> tuple[str, ...]:
        stops = tuple(self.params.stop)
        if stops and self.facts.encode is None:
            self.wrong("stop", "this scheduler has no tokenizer to match strings with; use stop_token_ids")
        if len(stops) > limits.MAX_STOP_STRINGS:
            self.wrong("stop", f"at most {limits.MAX_STOP_STRINGS} strings, got {len(stops)}")
            return ()
        for at, stop in enumerate(stops):
            if not stop:
                self.wrong(f"stop[{at}]", "must not be empty")
            elif len(stop) > limits.MAX_STOP_CHARACTERS:
                self.wrong(f"stop[{at}]", f"at most {limits.MAX_STOP_CHARACTERS} characters, got {len(stop)}")
        return stops

    def sampling(self, min_tokens: int, ending_ids: frozenset[int]) -> RowSampling:
        vocab_size = self.facts.vocab_size
        temperature = self.number("temperature", 1.0, 0.0, math.inf)
        top_k = int(self.get("top_k", 0))
        if top_k < -1:
            self.wrong("top_k", f"must be -1 or 0 (off) or above, got {top_k}")
        penalty = limits.MAX_PENALTY
        bias_ids, bias_values = self.logit_bias()
        allowed, bad = self.ids("allowed_token_ids"), self.ids("bad_token_ids")
        self.something_survives(allowed, bad, ending_ids if min_tokens else frozenset())
        mode = self.get("logprob_mode", pb.LOGPROB_MODE_TEMPERED)
        if mode not in (pb.LOGPROB_MODE_TEMPERED, pb.LOGPROB_MODE_RAW):
            self.wrong("logprob_mode", f"unknown value {mode}")
        return RowSampling(
            temperature=0.0 if temperature <= limits.GREEDY_TEMPERATURE else temperature,
            top_k=0 if top_k <= 0 or top_k >= vocab_size else top_k,
            top_p=self.number("top_p", 1.0, 0.0, 1.0, above=True),
            min_p=self.number("min_p", 0.0, 0.0, 1.0),
            presence_penalty=self.number("presence_penalty", 0.0, -penalty, penalty),
            frequency_penalty=self.number("frequency_penalty", 0.0, -penalty, penalty),
            repetition_penalty=self.number(
                "repetition_penalty", 1.0, limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
            ),
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed_ids=allowed,
            bad_ids=bad,
            min_tokens=min_tokens,
            stop_ids=np.array(sorted(ending_ids), np.int32),
            logprobs=self.alternatives("logprobs"),
            raw_logprobs=mode == pb.LOGPROB_MODE_RAW,
            return_logits=self.params.return_logits,
        )

    def logit_bias(self) -> tuple[Int32s, Any]:
        nothing = np.array([], np.int32), np.array([], np.float32)
        if len(self.params.logit_bias) > self.facts.vocab_size:
            number = len(self.params.logit_bias)
            self.wrong("logit_bias", f"{number} entries are more than the vocabulary of {self.facts.vocab_size}")
            return nothing
        entries = sorted(self.params.logit_bias.items())
        for token_id, bias in entries:
            if not 0 <= token_id < self.facts.vocab_size:
                self.wrong("logit_bias", outside_vocabulary(token_id, self.facts))
                return nothing
            if not abs(bias) <= limits.MAX_LOGIT_BIAS:
                bound = f"{limits.MAX_LOGIT_BIAS:g}"
                self.wrong(f"logit_bias[{token_id}]", f"must be finite, from -{bound} to {bound}, got {bias:g}")
        ids = np.array([token_id for token_id, _ in entries], np.int32)
        return ids, np.array([bias for _, bias in entries], np.float32)

    def something_survives(self, allowed: Int32s, bad: Int32s, masked: frozenset[int]) -> None:
        """At least one token must remain for the sampler, also while min_tokens masks every stop."""
        if not len(allowed) and len(bad) + len(masked) < self.facts.vocab_size:
            return
        left = set(allowed.tolist()) if len(allowed) else set(range(self.facts.vocab_size))
        left.difference_update(bad.tolist())
        if left and not left - masked:
            self.wrong("min_tokens", "masks every token that is allowed")
        elif not left:
            name = "allowed_token_ids" if len(allowed) else "bad_token_ids"
            self.wrong(name, "no token of the vocabulary is left")


def outside_vocabulary(token_id: int, facts: ModelFacts) -> str:
    return f"token id {token_id} is outside the vocabulary [0, {facts.vocab_size})"
