"""Messages for every RPC of both services: valid ones, and every way to be wrong.

Knows the services from their descriptors, so that a new RPC or field is covered the day it is added.
"""

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bench.traffic import mixed_requests
from protos import generation_pb2 as public
from protos import worker_pb2 as inner

INTS = (
    0,
    1,
    2,
    15,
    16,
    17,
    63,
    127,
    128,
    255,
    256,
    1000,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-6, 1e-38, 1e38, -1.0, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "Hello", "\x00", "ÿ€🦊", "../../etc/passwd", "%s%n", "a" * 5000, "\ud7ff", "/proc/1/fd/1")


class Target:
    """One RPC: its path, its kind, and the message it takes."""

    def __init__(self, path: str, message: type[Message], streams_in: bool, streams_out: bool, inner: bool) -> None:
        self.path, self.message = path, message
        self.streams_in, self.streams_out, self.inner = streams_in, streams_out, inner


def targets() -> list[Target]:
    found = []
    for name, service, is_inner in (
        ("lockstep.v1.Generation", public.DESCRIPTOR.services_by_name["Generation"], False),
        ("lockstep.v1.Worker", inner.DESCRIPTOR.services_by_name["Worker"], True),
        ("grpc.health.v1.Health", health_pb2.DESCRIPTOR.services_by_name["Health"], False),
        (
            "grpc.reflection.v1alpha.ServerReflection",
            reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
            False,
        ),
    ):
        for method in service.methods:
            found.append(
                Target(
                    f"/{name}/{method.name}",
                    _class_of(method.input_type),
                    method.client_streaming,
                    method.server_streaming,
                    is_inner,
                )
            )
    return found


def _class_of(descriptor: Any) -> type[Message]:
    for module in (public, inner, health_pb2, reflection_pb2):
        if module.DESCRIPTOR.name == descriptor.file.name:
            kind: type[Message] = getattr(module, descriptor.name)
            return kind
    raise AssertionError(descriptor.full_name)


def random_message(kind: type[Message], draw: random.Random, depth: int = 0) -> Message:
    """Any subset of the fields, each random or extreme."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw.random() < 0.4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            if value.type == FieldDescriptor.TYPE_FLOAT:
                for _ in range(draw.randint(1, 3)):
                    getattr(message, field.name)[draw.choice(INTS)] = draw.choice(FLOATS)
            continue
        count = draw.choice((1, 1, 2, 5)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is not None:
                if depth < 4 and field.message_type.file.name.startswith("protos/"):
                    part = random_message(_class_of(field.message_type), draw, depth + 1)
                    own = getattr(message, field.name)
                    own.add().CopyFrom(part) if field.is_repeated else own.CopyFrom(part)
                continue
            value = _random_value(field, draw)
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def _random_value(field: FieldDescriptor, draw: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 3, 4, 8, 64, 400)))
        return draw.choice(TEXTS)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice((0, 1, 2, 77))
    unsigned = kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT64) else 32
    value = draw.choice(INTS) * (1 if unsigned or draw.random() < 0.7 else -1)
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return min(high, max(low, value))


def random_bytes(target: Target, draw: random.Random, likely: Sequence[Message]) -> bytes:
    """One message on the wire, in one of the ways to be wrong (or, rarely, right)."""
    way = draw.random()
    if way < 0.15:
        return draw.randbytes(draw.choice((0, 1, 7, 50, 1000)))
    of_kind = [message for message in likely if isinstance(message, target.message)]
    valid = draw.choice(of_kind) if of_kind and draw.random() < 0.6 else random_message(target.message, draw)
    data = bytearray(valid.SerializeToString())
    if way < 0.35 and data:
        return bytes(data[: draw.randrange(len(data))])
    if way < 0.6 and data:
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def likely_messages(draw: random.Random) -> list[Message]:
    """Valid ones, to start from."""
    found: list[Message] = list(mixed_requests(draw.randrange(1 << 30), 24))
    for request in list(found):
        named = public.GenerateRequest()
        named.CopyFrom(request)
        named.request_id = f"r{draw.randrange(1000)}"
        found.append(public.ClientMessage(request=named))
        found.append(public.ClientMessage(cancel=named.request_id))
    for epoch in range(1, 4):
        found.append(
            inner.JoinRequest(
                epoch=epoch,
                tp=1,
                block_size=16,
                num_blocks=200,
                max_num_seqs=8,
                max_batch_tokens=64,
                max_seq_len=256,
                pipeline_depth=1,
                step_timeout_ms=3000,
            )
        )
        batch = inner.StepBatch(epoch=epoch, seq=1)
        row = batch.rows.add(slot=0, token_ids=bytes([1, 0, 0, 0] * 4), num_prompt=4, block_ids=bytes(4), seed=1)
        row.sampling.temperature, row.sampling.top_p, row.sampling.repetition_penalty = 1.0, 1.0, 1.0
        batch.slots, batch.num_new = bytes(4), bytes([4, 0, 0, 0])
        found.append(inner.StepRequest(batch=batch))
    return found
