"""Step values to protobuf messages and back: the only file that knows both forms.

Columns travel as packed little-endian bytes and are read without a copy. Decoding trusts nothing: a column whose
length does not fit its type, or ragged counts that do not add up, raise CodecError.
"""

from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from protos import step
from protos import worker_pb2 as pb

# Steps stay below this: the core bounds what one step introduces (core/batching.py), and logits travel in pieces.
MAX_MESSAGE_BYTES = 64 << 20
LOGITS_PIECE_BYTES = 1 << 20
# One list for both ends of the inner service, since pings that one end sends and the other does not expect earn a
# GOAWAY. A peer that is gone without a word (a stopped process, a cut network) is noticed within about 4 s.
WORKER_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.so_reuseport", 0),
)
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")  # a name would be parsed at each use


class CodecError(ValueError):
    """A message whose columns contradict each other."""


class _Columns:
    """Columns that a step value and its message have under the same names; each travels as one type.

    Two messages of every step pass here, and most columns of most steps are empty: those are neither packed nor read.
    """

    def __init__(self, **kinds: np.dtype[Any]) -> None:
        self._of = attrgetter(*kinds)
        self._kinds = tuple(kinds.items())
        self._empty = [(kind, step.NO_INTS if kind == _INT32 else step.NO_FLOATS) for kind in kinds.values()]

    def write(self, value: Any, message: Message) -> None:
        for (name, kind), column in zip(self._kinds, self._of(value)):
            if len(column):
                packed = column if column.dtype is kind else column.astype(kind)
                setattr(message, name, packed.tobytes())

    def read(self, message: Message) -> list[NDArray[Any]]:
        """In the order in which they were named."""
        columns = self._of(message)
        try:
            return [np.frombuffer(data, kind) if data else empty for data, (kind, empty) in zip(columns, self._empty)]
        except ValueError:  # what frombuffer says of a part of an item
            torn = [f"{name} has {len(data)}" for (name, _), data in zip(self._kinds, columns) if len(data) % 4]
            raise CodecError(f"bytes that are no whole number of items: {', '.join(torn)}") from None


def _same_length(what: str, one: NDArray[np.generic], other: NDArray[np.generic]) -> None:
    if len(one) != len(other):
        raise CodecError(f"{what}: columns of lengths {[len(one), len(other)]}")


_SAMPLING = _Columns(bias_ids=_INT32, bias_values=_FLOAT32, allowed_ids=_INT32, bad_ids=_INT32, stop_ids=_INT32)
_ROW = _Columns(token_ids=_INT32, block_ids=_INT32)
_BATCH = _Columns(
    retired=_INT32,
    extended_slots=_INT32,
    extended_counts=_INT32,
    extended_blocks=_INT32,
    fed_slots=_INT32,
    fed_token_ids=_INT32,
    slots=_INT32,
    num_new=_INT32,
    held=_INT32,
)
_RESULT = _Columns(
    token_ids=_INT32,
    logprobs=_FLOAT32,
    alternative_ids=_INT32,
    alternative_logprobs=_FLOAT32,
    prompt_logprobs=_FLOAT32,
    prompt_alternative_ids=_INT32,
    prompt_alternative_logprobs=_FLOAT32,
    failed_slots=_INT32,
)


def _write_sampling(sampling: step.RowSampling, message: pb.RowSampling) -> None:
    message.temperature = sampling.temperature
    message.top_k = sampling.top_k
    message.top_p = sampling.top_p
    message.min_p = sampling.min_p
    message.presence_penalty = sampling.presence_penalty
    message.frequency_penalty = sampling.frequency_penalty
    message.repetition_penalty = sampling.repetition_penalty
    message.min_tokens = sampling.min_tokens
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    message.raw_logprobs = sampling.raw_logprobs
    message.return_logits = sampling.return_logits
    _SAMPLING.write(sampling, message)


def _read_sampling(message: pb.RowSampling) -> step.RowSampling:
    bias_ids, bias_values, allowed_ids, bad_ids, stop_ids = _SAMPLING.read(message)
    _same_length("logit bias", bias_ids, bias_values)
    return step.RowSampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed_ids=allowed_ids,
        bad_ids=bad_ids,
        min_tokens=message.min_tokens,
        stop_ids=stop_ids,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        raw_logprobs=message.raw_logprobs,
        return_logits=message.return_logits,
    )


def _write_row(row: step.Row, message: pb.Row) -> None:
    message.slot = row.slot
    message.name = row.name
    message.num_prompt = row.num_prompt
    message.num_computed = row.num_computed
    message.seed = row.seed
    message.choice = row.choice
    if row.prompt_logprobs is not None:
        message.prompt_logprobs = row.prompt_logprobs
    message.num_cached = row.num_cached
    _ROW.write(row, message)
    _write_sampling(row.sampling, message.sampling)


def _read_row(message: pb.Row) -> step.Row:
    token_ids, block_ids = _ROW.read(message)
    return step.Row(
        slot=message.slot,
        name=message.name,
        token_ids=token_ids,
        num_prompt=message.num_prompt,
        num_computed=message.num_computed,
        block_ids=block_ids,
        seed=message.seed,
        choice=message.choice,
        sampling=_read_sampling(message.sampling),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        num_cached=message.num_cached,
    )


def _write_batch(batch: step.StepBatch, message: pb.StepBatch) -> None:
    message.epoch = batch.epoch
    message.seq = batch.seq
    _BATCH.write(batch, message)
    for row in batch.rows:
        _write_row(row, message.rows.add())


def encode_batch(batch: step.StepBatch) -> pb.StepBatch:
    message = pb.StepBatch()
    _write_batch(batch, message)
    return message


def encode_request(batch: step.StepBatch) -> pb.StepRequest:
    """The batch written in its place: a message that is given to another one is copied, field by field."""
    request = pb.StepRequest()
    _write_batch(batch, request.batch)
    return request


def decode_batch(message: pb.StepBatch) -> step.StepBatch:
    columns = _BATCH.read(message)
    retired, extended_slots, extended_counts, extended_blocks, fed_slots, fed_token_ids, slots, num_new, held = columns
    _same_length("extended", extended_slots, extended_counts)
    _same_length("fed", fed_slots, fed_token_ids)
    _same_length("slots", slots, num_new)
    counts = extended_counts.tolist()  # few, so that a list is quicker than an array; nearly always ones
    if not counts.count(1) == len(counts) == len(extended_blocks):
        if sum(counts) != len(extended_blocks) or min(counts, default=0) < 0:
            raise CodecError("extended_counts do not add up to extended_blocks")
    rows = message.rows
    return step.StepBatch(  # by position: names cost more, and a test knows the order
        message.epoch,
        message.seq,
        retired,
        tuple(map(_read_row, rows)) if rows else (),
        extended_slots,
        extended_counts,
        extended_blocks,
        fed_slots,
        fed_token_ids,
        slots,
        num_new,
        held,
    )


def encode_reply(result: step.StepResult) -> pb.StepReply:
    """Everything but the logits, which travel in pieces before this message."""
    reply = pb.StepReply()
    message = reply.result
    message.epoch = result.epoch
    message.seq = result.seq
    message.digest = result.digest
    message.run_ms = result.run_ms
    message.wait_ms = result.wait_ms
    _RESULT.write(result, message)
    if result.logits is not None:
        message.logits_rows = len(result.logits)
        message.logits_dtype = result.logits.dtype.name
    return reply


def decode_result(message: pb.StepResult, logits: step.Floats | None) -> step.StepResult:
    columns = _RESULT.read(message)
    token_ids, logprobs, alternative_ids, alternative_logprobs, prompt_logprobs = columns[:5]
    prompt_alternative_ids, prompt_alternative_logprobs, failed_slots = columns[5:]
    _same_length("alternatives", alternative_ids, alternative_logprobs)
    _same_length("prompt alternatives", prompt_alternative_ids, prompt_alternative_logprobs)
    if message.logits_rows != (0 if logits is None else len(logits)):
        raise CodecError(f"{message.logits_rows} rows of logits announced")
    return step.StepResult(
        message.epoch,
        message.seq,
        message.digest,
        token_ids,
        logprobs,
        alternative_ids,
        alternative_logprobs,
        prompt_logprobs,
        prompt_alternative_ids,
        prompt_alternative_logprobs,
        failed_slots,
        logits,
        message.run_ms,
        message.wait_ms,
    )


def encode_description(description: step.Description) -> pb.Description:
    states = pb.Description.State
    state = states.JOINED if description.epoch else states.READY if description.ready else states.LOADING
    return pb.Description(
        state=state,
        **{
            name: getattr(description, name)
            for name in step.Description.__slots__
            if name not in ("ready", "fingerprint")
        },
        fingerprint=dict(description.fingerprint),
    )


def decode_description(message: pb.Description) -> step.Description:
    plain = {
        name: getattr(message, name)
        for name in step.Description.__slots__
        if name not in ("ready", "fingerprint", "eos_token_ids", "bos_token_id")
    }
    return step.Description(
        **plain,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        fingerprint=dict(message.fingerprint),
        ready=message.state != pb.Description.State.LOADING,
    )


def encode_join(config: step.GroupConfig, rank: int, tp: int, store_address: str) -> pb.JoinRequest:
    return pb.JoinRequest(
        epoch=config.epoch,
        rank=rank,
        tp=tp,
        store_address=store_address,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_seq_len=config.max_seq_len,
        sample_at_scheduler=config.sample_at_scheduler,
        pipeline_depth=config.pipeline_depth,
        step_timeout_ms=round(config.step_timeout_s * 1000),
    )


def decode_join(message: pb.JoinRequest) -> step.GroupConfig:
    return step.GroupConfig(
        epoch=message.epoch,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        max_batch_tokens=message.max_batch_tokens,
        max_seq_len=message.max_seq_len,
        sample_at_scheduler=message.sample_at_scheduler,
        pipeline_depth=message.pipeline_depth,
        step_timeout_s=message.step_timeout_ms / 1000,
    )
