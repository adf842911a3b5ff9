"""Step values survive the wire, field by field, and what contradicts itself on the wire is refused."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from protos import codec
from protos import worker_pb2 as pb
from protos.step import Row, RowSampling, StepBatch, StepResult, int32s

SAMPLING = RowSampling(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    bias_ids=int32s(5, 6),
    bias_values=np.array([-1.5, 2.0], np.float32),
    allowed_ids=int32s(8),
    bad_ids=int32s(9, 10, 11),
    min_tokens=3,
    stop_ids=int32s(2),
    logprobs=4,
    raw_logprobs=True,
    return_logits=True,
)
ROW = Row(
    slot=12,
    name="r-1/0",
    token_ids=int32s(100, 101, 102),
    num_prompt=2,
    num_computed=1,
    block_ids=int32s(40, 41),
    seed=(1 << 64) - 1,
    choice=3,
    sampling=SAMPLING,
    prompt_logprobs=0,
    num_cached=1,
)
BATCH = StepBatch(
    epoch=1 << 40,
    seq=9,
    retired=int32s(1),
    rows=(ROW, Row(0, "", int32s(1), 1, 0, int32s(0), 0)),
    extended_slots=int32s(2, 3, 4),
    extended_counts=int32s(1, 2, 0),
    extended_blocks=int32s(50, 51, 52),
    fed_slots=int32s(5),
    fed_token_ids=int32s(-60),
    slots=int32s(6, 7),
    num_new=int32s(1, 16),
    held=int32s(8, 9),
)
RESULT = StepResult(
    epoch=1 << 40,
    seq=9,
    digest=(1 << 64) - 1,
    token_ids=int32s(70, -1),
    logprobs=np.array([-0.5, 0.0], np.float32),
    alternative_ids=int32s(71, 72, 73),
    alternative_logprobs=np.array([-1.0, -2.0, -np.inf], np.float32),
    prompt_logprobs=np.array([-3.0], np.float32),
    prompt_alternative_ids=int32s(74, 75),
    prompt_alternative_logprobs=np.array([-4.0, -5.0], np.float32),
    failed_slots=int32s(2),
    run_ms=1.5,
    wait_ms=0.25,
)
EMPTY = StepBatch(0, 0), StepResult(0, 0, 0)


def plain(value):
    """What two values must share to be equal: column types count, and so does which column it is."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def sent(batch):
    return codec.decode_batch(pb.StepRequest.FromString(codec.encode_request(batch).SerializeToString()).batch)


def answered(result):
    return codec.decode_result(pb.StepReply.FromString(codec.encode_reply(result).SerializeToString()).result, None)


def steady(counts, blocks):
    return pb.StepBatch(
        extended_slots=np.arange(len(counts), dtype="<i4").tobytes(),
        extended_counts=np.array(counts, "<i4").tobytes(),
        extended_blocks=np.arange(blocks, dtype="<i4").tobytes(),
    )


def columns_of(value):
    return [name for name in value.__slots__ if isinstance(getattr(value, name), np.ndarray)]


def test_the_values_above_leave_no_field_at_its_default_and_no_two_columns_alike():
    for value, default in (
        (SAMPLING, RowSampling()),
        (ROW, Row(0, "", int32s(), 0, 0, int32s(), 0)),
        (BATCH, EMPTY[0]),
        (replace(RESULT, logits=np.zeros((1, 2))), EMPTY[1]),
    ):
        for name, one in plain(value).items():
            assert one != plain(default)[name], name
        columns = [str(plain(value)[name]) for name in columns_of(value)]
        assert len(set(columns)) == len(columns)


@pytest.mark.parametrize("batch", [BATCH, EMPTY[0]], ids=["full", "empty"])
def test_a_batch_arrives_as_it_was_sent(batch):
    assert plain(sent(batch)) == plain(batch)
    assert plain(codec.decode_batch(codec.encode_batch(batch))) == plain(batch)


@pytest.mark.parametrize("result", [RESULT, EMPTY[1]], ids=["full", "empty"])
def test_a_result_arrives_as_it_was_sent(result):
    assert plain(answered(result)) == plain(result)


def test_the_request_has_the_bytes_of_a_batch_that_is_copied_into_it():
    for batch in (BATCH, EMPTY[0]):
        copied = pb.StepRequest(batch=codec.encode_batch(batch))
        assert codec.encode_request(batch).SerializeToString() == copied.SerializeToString()


@pytest.mark.parametrize(
    "owner, one, other",
    [
        ("_BATCH", "retired", "held"),
        ("_BATCH", "slots", "num_new"),
        ("_ROW", "token_ids", "block_ids"),
        ("_SAMPLING", "allowed_ids", "bad_ids"),
        ("_RESULT", "token_ids", "failed_slots"),
        ("_RESULT", "logprobs", "prompt_logprobs"),
    ],
)
def test_two_columns_read_for_one_another_are_noticed(monkeypatch, owner, one, other):
    real = getattr(codec, owner)
    swapped = {one: other, other: one}
    mutant = codec._Columns(**{swapped.get(name, name): kind for name, kind in real._kinds})
    mutant.write = real.write
    monkeypatch.setattr(codec, owner, mutant)
    assert (plain(sent(BATCH)), plain(answered(RESULT))) != (plain(BATCH), plain(RESULT))


def test_columns_of_other_types_and_strides_travel_by_value():
    wide = StepBatch(1, 2, held=np.arange(6)[::2], retired=np.array([3, 4], ">i4"))
    assert plain(sent(wide))["held"] == ("int32", [0, 2, 4])
    assert plain(sent(wide))["retired"] == ("int32", [3, 4])
    strided = replace(RESULT, logprobs=np.array([0.5, 9, 0.25, 9])[::2], token_ids=int32s(1, 9, 2, 9)[::2])
    assert plain(answered(strided))["logprobs"] == ("float32", [0.5, 0.25])
    assert plain(answered(strided))["token_ids"] == ("int32", [1, 2])


def test_what_was_read_cannot_be_written():
    for value in (sent(BATCH), sent(EMPTY[0]), answered(RESULT)):
        for name in columns_of(value):
            assert not getattr(value, name).flags.writeable


def every_column():
    batch, result = codec.encode_batch(BATCH), codec.encode_reply(RESULT).result
    row = batch.rows[0]
    for owner, value, decode in (
        (batch, BATCH, lambda: codec.decode_batch(batch)),
        (row, ROW, lambda: codec.decode_batch(batch)),
        (row.sampling, SAMPLING, lambda: codec.decode_batch(batch)),
        (result, RESULT, lambda: codec.decode_result(result, None)),
    ):
        for name in columns_of(value):
            yield pytest.param(owner, name, decode, id=f"{type(value).__name__}.{name}")


@pytest.mark.parametrize("owner, name, decode", list(every_column()))
@pytest.mark.parametrize("extra", [1, 2, 3])
def test_a_torn_item_is_refused_by_the_name_of_its_column(owner, name, decode, extra):
    whole = getattr(owner, name)
    decode()
    setattr(owner, name, whole + bytes(extra))
    try:
        with pytest.raises(codec.CodecError, match=rf"whole number.*\b{name}\b.*\b{len(whole) + extra}\b"):
            decode()
    finally:
        setattr(owner, name, whole)


@pytest.mark.parametrize(
    "name", ["extended_slots", "extended_counts", "fed_slots", "fed_token_ids", "slots", "num_new"]
)
def test_columns_of_a_batch_that_belong_together_have_one_length(name):
    for column in (b"", getattr(codec.encode_batch(BATCH), name) + bytes(4)):
        message = codec.encode_batch(BATCH)
        setattr(message, name, column)
        with pytest.raises(codec.CodecError, match="columns of lengths"):
            codec.decode_batch(message)


@pytest.mark.parametrize(
    "name", ["alternative_ids", "alternative_logprobs", "prompt_alternative_ids", "prompt_alternative_logprobs"]
)
def test_alternatives_of_a_result_are_pairs(name):
    message = codec.encode_reply(RESULT).result
    setattr(message, name, getattr(message, name)[4:])
    with pytest.raises(codec.CodecError, match="columns of lengths"):
        codec.decode_result(message, None)


@pytest.mark.parametrize("name", ["bias_ids", "bias_values"])
def test_a_bias_is_pairs(name):
    message = codec.encode_batch(BATCH)
    setattr(message.rows[0].sampling, name, bytes(12))
    with pytest.raises(codec.CodecError, match="logit bias"):
        codec.decode_batch(message)


@pytest.mark.parametrize(
    "counts, blocks",
    [
        ([1, 1], 3),
        ([1, 1], 1),
        ([1, 1, 1], 2),
        ([], 1),
        ([2, 2], 3),
        ([0], 1),
        ([3, -1], 2),  # adds up
        ([1, -1, 1], 1),
        ([1, 1, -2, 2], 2),  # as many ones as blocks
        ([-1], 0),
        ([-(1 << 31), 1], 1),
    ],
)
def test_counts_that_are_not_those_of_the_blocks_are_refused(counts, blocks):
    with pytest.raises(codec.CodecError, match="do not add up"):
        codec.decode_batch(steady(counts, blocks))


@pytest.mark.parametrize("counts", [[], [1], [1] * 64, [0], [0, 2], [2, 1, 0, 5]])
def test_counts_that_are_those_of_the_blocks_are_taken(counts):
    assert codec.decode_batch(steady(counts, sum(counts))).extended_counts.tolist() == counts


def test_announced_logits_are_those_that_came():
    logits = np.zeros((2, 5), np.float32)
    message = codec.encode_reply(replace(RESULT, logits=logits)).result
    assert (message.logits_rows, message.logits_dtype) == (2, "float32")
    assert codec.decode_result(message, logits).logits is logits
    for other in (None, logits[:1]):
        with pytest.raises(codec.CodecError, match="2 rows of logits announced"):
            codec.decode_result(message, other)
