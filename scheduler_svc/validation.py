"""A GenerateRequest and the model's facts to a core Request, or a list of what is wrong, field by field.

Pure: no clock, no wire, no tokenizer state. Presence is asked of every field and never guessed from its value, since
absent and zero are different. docs/api.md states these rules to users.

    InvalidRequest      INVALID_ARGUMENT, a google.rpc.BadRequest naming each field
    WrongFingerprint    FAILED_PRECONDITION
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protos import generation_pb2 as pb
from protos.step import Int32s
from scheduler_svc import limits
from scheduler_svc.core.request import Request
from scheduler_svc.sampling_fields import ModelFacts, SamplingFields, Violation, outside_vocabulary


class InvalidRequest(Exception):
    """The request breaks the rules of the API; the message is complete, since proxies forward only that."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = tuple(violations)


class WrongFingerprint(Exception):
    """The caller expects bits that this engine does not promise."""


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
    check = SamplingFields(message.sampling, facts)
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
        raise InvalidRequest([Violation(f"{name}[{at}]", outside_vocabulary(int(column[at]), facts))])
    return column.astype(np.int32)


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
    check: SamplingFields,
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
        return 0, ()
    columns = []
    for index, choice in enumerate(resume.choices):
        name = f"resume.choices[{index}].token_ids"
        if len(choice.token_ids) > max_tokens:
            violations.append(Violation(name, f"{len(choice.token_ids)} tokens are more than max_tokens {max_tokens}"))
            continue
        column = np.fromiter(choice.token_ids, np.uint64)
        outside = column >= facts.vocab_size
        if outside.any():
            violations.append(Violation(name, outside_vocabulary(int(column[outside.argmax()]), facts)))
            continue
        for position, token_id in enumerate(column[:-1].tolist()):
            if token_id in ending_ids and position >= min_tokens:
                violations.append(Violation(name, f"goes on after token {position}, which ended the choice"))
                break
        columns.append(column.astype(np.int32))
    return (seed_of(request_id) if seed is None else seed), tuple(columns)
