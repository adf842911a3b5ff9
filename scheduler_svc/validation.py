"""A GenerateRequest and the model's facts to a core Request, or a list of what is wrong, field by field.

Pure: no clock, no wire, no tokenizer state. Presence is asked of every field and never guessed from its value, since
absent and zero are different. docs/api.md states these rules to users.

    InvalidRequest      INVALID_ARGUMENT, a google.rpc.BadRequest naming each field
    WrongFingerprint    FAILED_PRECONDITION
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos import generation_pb2 as pb
from protos.step import Int32s, RowSampling
from scheduler_svc import limits
from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class Violation:
    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidRequest(Exception):
    """The request breaks the rules of the API; the message is complete, since proxies forward only that."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = tuple(violations)


class WrongFingerprint(Exception):
    """The caller expects bits that this engine does not promise."""


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


@dataclass(frozen=True, eq=False, slots=True)
class TextRules:
    """What decides the text of every choice."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    ending_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """A valid request: the core's half and the front end's."""

    request: Request
    text: TextRules
    wants_logprobs: bool


def prompt_ids(message: pb.GenerateRequest, facts: ModelFacts) -> Int32s:
    """The prompt as token ids [tokens]. The costly part of validation for long texts. Raises InvalidRequest."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest([Violation("prompt", "one of text, token_ids and chat is required")])
    if kind == "token_ids":
        ids = message.token_ids.ids
        if len(ids) > facts.max_seq_len:
            raise InvalidRequest([_too_long("token_ids.ids", len(ids), facts)])
        return _ids_column(ids, "token_ids.ids", facts)
    name = "text" if kind == "text" else "chat.messages"
    try:
        if kind == "text":
            if facts.encode is None:
                raise ValueError("this scheduler has no tokenizer; send token_ids")
            tokens = facts.encode(message.text)
        else:
            tokens = _chat_ids(message.chat, facts)
    except ValueError as error:
        raise InvalidRequest([Violation(name, str(error))]) from error
    if not tokens:
        raise InvalidRequest([Violation(name, "the prompt is empty: it has no token")])
    if len(tokens) > facts.max_seq_len:
        raise InvalidRequest([_too_long(name, len(tokens), facts)])
    return _ids_column(tokens, name, facts)


def prepare(
    message: pb.GenerateRequest,
    prompt: Int32s,
    facts: ModelFacts,
    *,
    key: int,
    request_id: str,
    now: float,
    deadline: float | None = None,
) -> Prepared:
    """The request with every field checked; it arrived at `now`, and its call ends at `deadline`.

    Raises InvalidRequest with all violations, WrongFingerprint.
    """
    if message.HasField("expected_fingerprint") and message.expected_fingerprint != facts.fingerprint:
        raise WrongFingerprint(
            f"expected fingerprint {message.expected_fingerprint}, this engine has {facts.fingerprint}"
        )
    check = _Check(message.sampling, facts)
    identity(message, check.violations)
    prompt_logprobs = check.alternatives("prompt_logprobs")
    max_tokens, min_tokens = check.token_counts(len(prompt), prompt_logprobs is not None)
    n = check.integer("n", 1, low=1, high=limits.MAX_CHOICES)
    stop_token_ids = check.ids("stop_token_ids")
    eos_ids = frozenset() if message.sampling.ignore_eos else facts.eos_ids
    ending_ids = eos_ids | frozenset(stop_token_ids.tolist())
    sampling = check.sampling(min_tokens, ending_ids)
    stops = check.stops()
    seed, resume = _resume(message, check, ending_ids, n, min_tokens, max_tokens, request_id)
    deadlines = [] if deadline is None else [deadline]
    if message.HasField("timeout_ms"):
        deadlines.append(now + _timeout(message, check.violations))
    if check.violations:
        raise InvalidRequest(check.violations)
    request = Request(
        key=key,
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        seed=seed,
        max_tokens=max_tokens,
        n=n,
        eos_ids=eos_ids,
        stop_token_ids=frozenset(stop_token_ids.tolist()),
        prompt_logprobs=prompt_logprobs,
        resume=resume,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        deadline=min(deadlines, default=None),
        arrival=now,
    )
    rules = TextRules(
        stops=stops,
        include_stop=message.sampling.include_stop_str_in_output,
        skip_special_tokens=check.get("skip_special_tokens", True),
        min_tokens=min_tokens,
        ending_ids=ending_ids,
    )
    return Prepared(request, rules, message.sampling.HasField("logprobs"))


def seed_of(request_id: str) -> int:
    """The seed of a request that brings none: 64 bits of its id, so that a retry under one id draws the same."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def identity(message: pb.GenerateRequest, violations: list[Violation]) -> None:
    """Checks the names that a request carries."""
    if message.HasField("request_id") and not message.request_id:
        violations.append(Violation("request_id", "must not be empty; leave it out to have one assigned"))
    for name in ("request_id", "tenant", "cache_salt"):
        size = len(getattr(message, name).encode())
        if size > limits.MAX_NAME_BYTES:
            violations.append(Violation(name, f"at most {limits.MAX_NAME_BYTES} bytes, got {size}"))


def _too_long(name: str, length: int, facts: ModelFacts) -> Violation:
    return Violation(name, f"the prompt has {length} tokens, the context is {facts.max_seq_len}")


def _ids_column(ids: Iterable[int], name: str, facts: ModelFacts) -> Int32s:
    column = np.fromiter(ids, np.uint64)
    if not len(column):
        raise InvalidRequest([Violation(name, "the prompt is empty: it has no token")])
    outside = column >= facts.vocab_size
    if outside.any():
        at = int(outside.argmax())
        raise InvalidRequest([Violation(f"{name}[{at}]", _outside(int(column[at]), facts))])
    return column.astype(np.int32)


def _outside(token_id: int, facts: ModelFacts) -> str:
    return f"token id {token_id} is outside the vocabulary [0, {facts.vocab_size})"


def _chat_ids(chat: pb.Chat, facts: ModelFacts) -> list[int]:
    if facts.encode_chat is None:
        raise ValueError("this scheduler has no tokenizer; send token_ids")
    if not chat.messages:
        raise ValueError("a chat needs at least one message")
    if len(chat.messages) > limits.MAX_CHAT_MESSAGES:
        raise ValueError(f"at most {limits.MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}")
    for at, entry in enumerate(chat.messages):
        if not entry.role:
            raise ValueError(f"message {at} has no role")
    messages = [{"role": entry.role, "content": entry.content} for entry in chat.messages]
    return facts.encode_chat(messages, chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True)


def _timeout(message: pb.GenerateRequest, violations: list[Violation]) -> float:
    if message.timeout_ms <= 0:
        violations.append(Violation("timeout_ms", f"must be above 0, got {message.timeout_ms}"))
    return message.timeout_ms / 1000


def _resume(
    message: pb.GenerateRequest,
    check: "_Check",
    ending_ids: frozenset[int],
    n: int,
    min_tokens: int,
    max_tokens: int,
    request_id: str,
) -> tuple[int, tuple[Int32s, ...]]:
    """The seed in force and the tokens that each choice already has."""
    asked = message.sampling.seed if message.sampling.HasField("seed") else None
    if not message.HasField("resume"):
        return (seed_of(request_id) if asked is None else asked), ()
    resume, facts, violations = message.resume, check.facts, check.violations
    seed = resume.seed if resume.HasField("seed") else asked
    if asked is not None and seed != asked:
        violations.append(Violation("resume.seed", f"{seed} contradicts sampling.seed {asked}"))
    if len(resume.choices) != n:
        violations.append(
            Violation("resume.choices", f"needs one entry for each of {n} choices, got {len(resume.choices)}")
        )
    columns = []
    for index, choice in enumerate(resume.choices):
        name = f"resume.choices[{index}].token_ids"
        if len(choice.token_ids) > max_tokens:
            violations.append(Violation(name, f"{len(choice.token_ids)} tokens are more than max_tokens {max_tokens}"))
            continue
        column = np.fromiter(choice.token_ids, np.uint64)
        outside = column >= facts.vocab_size
        if outside.any():
            violations.append(Violation(name, _outside(int(column[outside.argmax()]), facts)))
            continue
        for position, token_id in enumerate(column[:-1].tolist()):
            if token_id in ending_ids and position >= min_tokens:
                violations.append(Violation(name, f"goes on after token {position}, which ended the choice"))
                break
        columns.append(column.astype(np.int32))
    return (seed_of(request_id) if seed is None else seed), tuple(columns)


@dataclass(slots=True)
class _Check:
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
            self.wrong(name, _outside(int(column[outside.argmax()]), self.facts))
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
        entries = sorted(self.params.logit_bias.items())
        for token_id, bias in entries:
            if not 0 <= token_id < self.facts.vocab_size:
                self.wrong("logit_bias", _outside(token_id, self.facts))
                return np.array([], np.int32), np.array([], np.float32)
            if not math.isfinite(bias):
                self.wrong(f"logit_bias[{token_id}]", f"must be finite, got {bias:g}")
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
