"""What a request was told, in a form whose equality is equality of bits."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from protos import generation_pb2 as pb


@dataclass
class Choice:
    """One choice: a token id and, as bytes, everything else that came with it, for each position."""

    token_ids: list[int] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    text: str = ""
    finish: bytes = b""


@dataclass
class Answer:
    """All that a request was told. `refusal` is the message of a request that was not served."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt: list[bytes] = field(default_factory=list)
    seed: int | None = None
    fingerprint: str = ""
    cached_tokens: int = 0
    ended: bool = False
    refusal: str = ""

    def take(self, event: pb.GenerateEvent) -> None:
        if event.HasField("status"):
            self.refusal, self.ended = f"{grpc.StatusCode(_code(event.status.code)).name}: {event.status.message}", True
            return
        if event.HasField("started"):
            self.seed, self.fingerprint = event.started.seed, event.started.fingerprint.digest
        choice = self.choices.setdefault(event.index, Choice())
        row = len(event.logits) // max(len(event.token_ids), 1)
        for i, token in enumerate(event.token_ids):
            choice.token_ids.append(token)
            detail = struct.pack("<f", event.logprobs[i]) if event.logprobs else b""
            detail += event.alternatives[i].SerializeToString(deterministic=True) if event.alternatives else b""
            choice.details.append(detail + event.logits[i * row : (i + 1) * row])
        choice.text += event.text
        self.prompt.extend(one.SerializeToString(deterministic=True) for one in event.prompt_logprobs)
        if event.HasField("finish"):
            choice.finish = event.finish.SerializeToString(deterministic=True)
        if event.HasField("usage"):
            self.cached_tokens, self.ended = event.usage.cached_tokens, True

    @property
    def positions(self) -> int:
        """Sampled positions."""
        return sum(len(choice.token_ids) for choice in self.choices.values())


def _code(number: int) -> tuple[int, str]:
    return next(code.value for code in grpc.StatusCode if code.value[0] == number)


def differing(expected: Answer, got: Answer) -> int:
    """Positions, sampled or of the prompt, at which two answers differ; an ending that differs counts as one."""
    if expected.refusal or got.refusal:
        return max(1, expected.positions) if expected.refusal != got.refusal else 0
    count = _unequal(expected.prompt, got.prompt)
    for index in expected.choices.keys() | got.choices.keys():
        one, other = expected.choices.get(index, Choice()), got.choices.get(index, Choice())
        pairs = list(zip(one.token_ids, one.details)), list(zip(other.token_ids, other.details))
        found = _unequal(*pairs)
        count += found or int((one.text, one.finish) != (other.text, other.finish))
    return count + (not got.ended)


def _unequal(one: list, other: list) -> int:
    return sum(a != b for a, b in zip(one, other)) + abs(len(one) - len(other))


def describe(expected: Answer, got: Answer) -> str:
    """Where the first difference is, for people."""
    if expected.refusal or got.refusal:
        return f"alone {expected.refusal or 'served'!r}, here {got.refusal or 'served'!r}"
    if _unequal(expected.prompt, got.prompt):
        return f"{_unequal(expected.prompt, got.prompt)} prompt scores"
    for index in sorted(expected.choices.keys() | got.choices.keys()):
        one, other = expected.choices.get(index, Choice()), got.choices.get(index, Choice())
        for t, (a, b) in enumerate(zip(zip(one.token_ids, one.details), zip(other.token_ids, other.details))):
            if a != b:
                return f"choice {index}, output position {t}: token {a[0]} alone, {b[0]} here"
        if len(one.token_ids) != len(other.token_ids):
            return f"choice {index}: {len(one.token_ids)} tokens alone, {len(other.token_ids)} here"
        if (one.text, one.finish) != (other.text, other.finish):
            return (
                f"choice {index}: ends with {one.text[-20:]!r} alone, {other.text[-20:]!r} here, or for another reason"
            )
    return "no end" if not got.ended else "nothing"


def gather(events: Iterable[pb.GenerateEvent]) -> Answer:
    """The answer of one request's stream; a refused call is an answer too."""
    answer = Answer()
    try:
        for event in events:
            answer.take(event)
    except grpc.RpcError as error:
        answer.refusal, answer.ended = f"{error.code().name}: {error.details()}", True
    return answer
