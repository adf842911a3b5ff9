"""Mixed requests and their whole answers: what the chaos and fuzz runs send and compare, and what tests of failure do.

An `Answer` holds every bit that a client can see (tokens, logprobs, alternatives, text, finish, usage), so that two of
them are equal exactly when nobody could tell the runs apart.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc

OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


@dataclass
class ChoiceAnswer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    text: str = ""
    logits: bytes = b""
    finish: str = ""


@dataclass
class Answer:
    """`error` is the status code's name when the stream did not end well."""

    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    seed: int = 0
    fingerprint: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    terminal_events: int = 0
    error: str = ""
    details: str = field(default="", compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, event: pb.GenerateEvent) -> None:
        if event.HasField("started"):
            self.seed = event.started.seed
            self.fingerprint = event.started.fingerprint.digest
            self.prompt_tokens = event.started.prompt_tokens
        choice = self.choices.setdefault(event.index, ChoiceAnswer())
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.alternatives += [
            tuple((entry.token_id, entry.logprob) for entry in token.alternatives) for token in event.alternatives
        ]
        choice.text += event.text
        choice.logits += event.logits
        self.prompt_logprobs += [entry.logprob for entry in event.prompt_logprobs]
        if event.HasField("finish"):
            self.terminal_events += 1
            choice.finish = f"{event.finish.reason} {event.finish.stop_reason} {event.finish.cumulative_logprob!r}"
        if event.HasField("usage"):
            self.completion_tokens = event.usage.completion_tokens

    def is_whole(self, n: int) -> bool:
        """Every choice has ended once, without an error."""
        return not self.error and self.terminal_events == n == len(self.choices)


def ask(
    stub: generation_pb2_grpc.GenerationStub,
    request: pb.GenerateRequest,
    on_event: Callable[[Answer], object] = lambda answer: None,
    timeout_s: float = 120.0,
) -> Answer:
    """One request to its end."""
    answer = Answer()
    try:
        for event in stub.Generate(request, timeout=timeout_s):
            answer.add(event)
            on_event(answer)
    except grpc.RpcError as error:
        answer.error, answer.details = error.code().name, error.details() or ""
    return answer


class Crowd:
    """Requests that run at once, each in a thread; `answers` fill as they go."""

    def __init__(self, address: str, requests: Sequence[pb.GenerateRequest], timeout_s: float = 120.0) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        self.counts = [0] * len(requests)
        self.answers: list[Answer | None] = [None] * len(requests)
        self._moved = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(stub, i, request, timeout_s), daemon=True)
            for i, request in enumerate(requests)
        ]
        for thread in self._threads:
            thread.start()

    def _run(
        self, stub: generation_pb2_grpc.GenerationStub, i: int, request: pb.GenerateRequest, timeout_s: float
    ) -> None:
        def moved(answer: Answer) -> None:
            with self._moved:
                self.counts[i] = answer.num_tokens
                self._moved.notify_all()

        answer = ask(stub, request, moved, timeout_s)
        with self._moved:
            self.answers[i] = answer
            self._moved.notify_all()

    def wait_for_tokens(self, total: int, timeout_s: float = 60.0) -> bool:
        """Until all streams together have so many tokens, or have ended."""
        with self._moved:
            return self._moved.wait_for(lambda: sum(self.counts) >= total or self._ended(), timeout_s)

    def wait_for_each(self, tokens: int, timeout_s: float = 60.0) -> bool:
        """Until every stream has so many tokens or has ended."""
        with self._moved:
            return self._moved.wait_for(
                lambda: all(n >= tokens or a is not None for n, a in zip(self.counts, self.answers)), timeout_s
            )

    def _ended(self) -> bool:
        return all(answer is not None for answer in self.answers)

    def join(self, timeout_s: float = 180.0) -> list[Answer]:
        for thread in self._threads:
            thread.join(timeout_s)
        self._channel.close()
        return [answer if answer is not None else Answer(error="HANGS") for answer in self.answers]


def mixed_requests(seed: int, count: int = 16, vocabulary: int = 256, max_prompt: int = 60) -> list[pb.GenerateRequest]:
    """Requests of every kind whose answers are a function of themselves alone; the same for the same seed."""
    draw = random.Random(seed)
    prefix = [draw.randrange(vocabulary) for _ in range(40)]
    return [_mixed_request(draw, i, prefix, vocabulary, max_prompt) for i in range(count)]


def _mixed_request(
    draw: random.Random, i: int, prefix: list[int], vocabulary: int, max_prompt: int
) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(1, max_prompt))]
    request.token_ids.ids.extend(prefix + tokens if draw.random() < 0.4 else tokens)
    sampling = request.sampling
    sampling.max_tokens = draw.randint(12, 60)
    sampling.seed = draw.randrange(1 << 64)
    sampling.temperature = draw.choice((0.0, 0.7, 1.0, 1.3))
    sampling.ignore_eos = draw.random() < 0.7
    kind = i % 8
    if kind == 1:
        sampling.n = 4
    elif kind == 2:
        sampling.logprobs = draw.randint(0, 5)
    elif kind == 3:
        sampling.repetition_penalty, sampling.presence_penalty = 1.3, 0.5
        sampling.frequency_penalty = -0.2
    elif kind == 4:
        sampling.stop.extend(draw.sample([chr(c) for c in range(65, 91)], 6))
        sampling.include_stop_str_in_output = draw.random() < 0.5
    elif kind == 5:
        sampling.top_k, sampling.top_p, sampling.min_p = draw.randint(2, 50), 0.9, 0.01
    elif kind == 6:
        sampling.min_tokens = draw.randint(1, sampling.max_tokens)
        sampling.stop_token_ids.extend(draw.sample(range(vocabulary), 8))
        sampling.logprobs = 2
    elif kind == 7:
        sampling.prompt_logprobs = 1
        sampling.logit_bias[draw.randrange(vocabulary)] = 2.0
    return request
