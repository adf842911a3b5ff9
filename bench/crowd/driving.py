"""Sending requests: one alone on an idle service, or many over one stream at random moments, some to be cancelled."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc

from bench.crowd.answers import Answer, gather
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc

OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Arrival:
    """One request of a crowd: how long after the one before it, and whether it is cancelled so long after."""

    request: pb.GenerateRequest
    pause_s: float = 0.0
    cancel_after_s: float | None = None


def draw_crowd(rng: random.Random, requests: Sequence[pb.GenerateRequest]) -> list[Arrival]:
    """The requests in random order, in bursts and at random steps; a tenth of a large crowd is cancelled."""
    order = list(requests)
    rng.shuffle(order)
    spread = rng.choice((0.0, 0.002, 0.01, 0.03))
    return [
        Arrival(
            request,
            rng.random() * spread if rng.random() < 0.7 else 0.0,
            rng.random() * 0.1 if len(order) > 4 and rng.random() < 0.1 else None,
        )
        for request in order
    ]


class Driver:
    """Talks to the services at one address."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def alone(self, request: pb.GenerateRequest) -> Answer:
        """Over Generate; the caller sends nothing else meanwhile."""
        return gather(self._stub.Generate(request, timeout=PATIENCE_S))

    def crowd(self, arrivals: Sequence[Arrival]) -> Mapping[str, Answer]:
        """Over GenerateMany: request id -> answer, without those that were to be cancelled."""
        answers = {arrival.request.request_id: Answer() for arrival in arrivals}
        ended: SimpleQueue[None] = SimpleQueue()
        stream = self._stub.GenerateMany(self._messages(arrivals, ended), timeout=PATIENCE_S)
        waiting = set(answers)
        try:
            for message in stream:
                for event in message.events:
                    answer = answers[event.request_id]
                    answer.take(event)
                    if answer.ended:
                        waiting.discard(event.request_id)
                if not waiting:
                    ended.put(None)
        except grpc.RpcError as error:
            for name in waiting:
                answers[name].refusal, answers[name].ended = f"stream: {error.code().name}: {error.details()}", True
            ended.put(None)
        return {
            arrival.request.request_id: answers[arrival.request.request_id]
            for arrival in arrivals
            if arrival.cancel_after_s is None
        }

    def stats(self) -> dict[str, float]:
        return dict(self._stub.Stats(pb.StatsRequest(), timeout=PATIENCE_S).values)

    def info(self) -> pb.ModelInfo:
        info: pb.ModelInfo = self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S)
        return info

    @staticmethod
    def _messages(arrivals: Sequence[Arrival], ended: "SimpleQueue[None]") -> Iterator[pb.ClientMessage]:
        moments: list[tuple[float, int, pb.ClientMessage]] = []
        at = 0.0
        for place, arrival in enumerate(arrivals):
            at += arrival.pause_s
            moments.append((at, place, pb.ClientMessage(request=arrival.request)))
            if arrival.cancel_after_s is not None:
                cancel = pb.ClientMessage(cancel=arrival.request.request_id)
                moments.append((at + arrival.cancel_after_s, len(arrivals) + place, cancel))
        start = time.monotonic()
        for moment, _, message in sorted(moments, key=lambda item: item[:2]):
            time.sleep(max(0.0, start + moment - time.monotonic()))
            yield message
        ended.get()  # the stream stays open until everything has been answered
