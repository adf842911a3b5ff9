"""Step values to protobuf messages and back: the only file that knows both forms.

Columns travel as packed little-endian bytes and are read without a copy. Decoding trusts nothing: a column whose
length does not fit its type, or ragged counts that do not add up, raise CodecError.
"""

from typing import Any

import numpy as np
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


def _ints(data: bytes, name: str) -> step.Int32s:
    if not data:
        return step.NO_INTS  # most columns of most steps
    if len(data) % 4:
        raise CodecError(f"{name}: {len(data)} bytes is no whole number of int32")
    return np.frombuffer(data, _INT32)


def _floats(data: bytes, name: str) -> step.Float32s:
    if not data:
        return step.NO_FLOATS
    if len(data) % 4:
        raise CodecError(f"{name}: {len(data)} bytes is no whole number of float32")
    return np.frombuffer(data, _FLOAT32)


def _pack(column: NDArray[np.generic], kind: np.dtype[np.generic]) -> bytes:
    return np.ascontiguousarray(column, kind).tobytes()


def _same_length(what: str, one: NDArray[np.generic], other: NDArray[np.generic]) -> None:
    if len(one) != len(other):
        raise CodecError(f"{what}: columns of lengths {[len(one), len(other)]}")


def encode_sampling(sampling: step.RowSampling) -> pb.RowSampling:
    return pb.RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_ids=_pack(sampling.bias_ids, _INT32),
        bias_values=_pack(sampling.bias_values, _FLOAT32),
        allowed_ids=_pack(sampling.allowed_ids, _INT32),
        bad_ids=_pack(sampling.bad_ids, _INT32),
        min_tokens=sampling.min_tokens,
        stop_ids=_pack(sampling.stop_ids, _INT32),
        logprobs=sampling.logprobs,
        raw_logprobs=sampling.raw_logprobs,
        return_logits=sampling.return_logits,
    )


def decode_sampling(message: pb.RowSampling) -> step.RowSampling:
    sampling = step.RowSampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        bias_ids=_ints(message.bias_ids, "bias_ids"),
        bias_values=_floats(message.bias_values, "bias_values"),
        allowed_ids=_ints(message.allowed_ids, "allowed_ids"),
        bad_ids=_ints(message.bad_ids, "bad_ids"),
        min_tokens=message.min_tokens,
        stop_ids=_ints(message.stop_ids, "stop_ids"),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        raw_logprobs=message.raw_logprobs,
        return_logits=message.return_logits,
    )
    _same_length("logit bias", sampling.bias_ids, sampling.bias_values)
    return sampling


def encode_row(row: step.Row) -> pb.Row:
    return pb.Row(
        slot=row.slot,
        name=row.name,
        token_ids=_pack(row.token_ids, _INT32),
        num_prompt=row.num_prompt,
        num_computed=row.num_computed,
        block_ids=_pack(row.block_ids, _INT32),
        seed=row.seed,
        choice=row.choice,
        sampling=encode_sampling(row.sampling),
        prompt_logprobs=row.prompt_logprobs,
        num_cached=row.num_cached,
    )


def decode_row(message: pb.Row) -> step.Row:
    return step.Row(
        slot=message.slot,
        name=message.name,
        token_ids=_ints(message.token_ids, "token_ids"),
        num_prompt=message.num_prompt,
        num_computed=message.num_computed,
        block_ids=_ints(message.block_ids, "block_ids"),
        seed=message.seed,
        choice=message.choice,
        sampling=decode_sampling(message.sampling),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        num_cached=message.num_cached,
    )


BATCH_COLUMNS = (
    "retired",
    "extended_slots",
    "extended_counts",
    "extended_blocks",
    "fed_slots",
    "fed_token_ids",
    "slots",
    "num_new",
    "held",
)


def encode_batch(batch: step.StepBatch) -> pb.StepBatch:
    message = pb.StepBatch(epoch=batch.epoch, seq=batch.seq, rows=[encode_row(row) for row in batch.rows])
    for name in BATCH_COLUMNS:
        column = getattr(batch, name)
        if len(column):
            setattr(message, name, _pack(column, _INT32))
    return message


def decode_batch(message: pb.StepBatch) -> step.StepBatch:
    columns = {name: _ints(getattr(message, name), name) for name in BATCH_COLUMNS}
    batch = step.StepBatch(message.epoch, message.seq, rows=tuple(map(decode_row, message.rows)), **columns)
    _same_length("extended", batch.extended_slots, batch.extended_counts)
    _same_length("fed", batch.fed_slots, batch.fed_token_ids)
    _same_length("slots", batch.slots, batch.num_new)
    counts = batch.extended_counts.tolist()  # few, so that a list is quicker than an array
    if sum(counts) != len(batch.extended_blocks) or min(counts, default=0) < 0:
        raise CodecError("extended_counts do not add up to extended_blocks")
    return batch


RESULT_INTS = ("token_ids", "alternative_ids", "prompt_alternative_ids", "failed_slots")
RESULT_FLOATS = ("logprobs", "alternative_logprobs", "prompt_logprobs", "prompt_alternative_logprobs")


def encode_result(result: step.StepResult) -> pb.StepResult:
    """Everything but the logits, which travel in pieces before this message."""
    message = pb.StepResult(
        epoch=result.epoch, seq=result.seq, digest=result.digest, run_ms=result.run_ms, wait_ms=result.wait_ms
    )
    for names, kind in ((RESULT_INTS, _INT32), (RESULT_FLOATS, _FLOAT32)):
        for name in names:
            column = getattr(result, name)
            if len(column):
                setattr(message, name, _pack(column, kind))
    if result.logits is not None:
        message.logits_rows = len(result.logits)
        message.logits_dtype = result.logits.dtype.name
    return message


def decode_result(message: pb.StepResult, logits: step.Floats | None) -> step.StepResult:
    ints: dict[str, Any] = {name: _ints(getattr(message, name), name) for name in RESULT_INTS}
    floats: dict[str, Any] = {name: _floats(getattr(message, name), name) for name in RESULT_FLOATS}
    result = step.StepResult(
        message.epoch,
        message.seq,
        message.digest,
        **ints,
        **floats,
        logits=logits,
        run_ms=message.run_ms,
        wait_ms=message.wait_ms,
    )
    _same_length("alternatives", result.alternative_ids, result.alternative_logprobs)
    _same_length("prompt alternatives", result.prompt_alternative_ids, result.prompt_alternative_logprobs)
    if message.logits_rows != (0 if logits is None else len(logits)):
        raise CodecError(f"{message.logits_rows} rows of logits announced")
    return result


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
