from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("state", "rank", "tp", "model", "model_path", "vocab_size", "max_position_embeddings", "num_layers", "kv_heads", "head_dim", "dtype", "kv_dtype", "device", "memory_bytes", "kv_bytes_per_token", "eos_token_ids", "bos_token_id", "fingerprint", "epoch")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LOADING: _ClassVar[Description.State]
        READY: _ClassVar[Description.State]
        JOINED: _ClassVar[Description.State]
    LOADING: Description.State
    READY: Description.State
    JOINED: Description.State
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    state: Description.State
    rank: int
    tp: int
    model: str
    model_path: str
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    device: str
    memory_bytes: int
    kv_bytes_per_token: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    fingerprint: _containers.ScalarMap[str, str]
    epoch: int
    def __init__(self, state: _Optional[_Union[Description.State, str]] = ..., rank: _Optional[int] = ..., tp: _Optional[int] = ..., model: _Optional[str] = ..., model_path: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_position_embeddings: _Optional[int] = ..., num_layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("epoch", "rank", "tp", "store_address", "block_size", "num_blocks", "max_num_seqs", "max_batch_tokens", "max_seq_len", "sample_at_scheduler", "pipeline_depth", "step_timeout_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AT_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    tp: int
    store_address: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_batch_tokens: int
    max_seq_len: int
    sample_at_scheduler: bool
    pipeline_depth: int
    step_timeout_ms: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., tp: _Optional[int] = ..., store_address: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., sample_at_scheduler: _Optional[bool] = ..., pipeline_depth: _Optional[int] = ..., step_timeout_ms: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("store_address", "num_blocks")
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store_address: str
    num_blocks: int
    def __init__(self, store_address: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "bias_values", "allowed_ids", "bad_ids", "min_tokens", "stop_ids", "logprobs", "raw_logprobs", "return_logits")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: bytes
    bias_values: bytes
    allowed_ids: bytes
    bad_ids: bytes
    min_tokens: int
    stop_ids: bytes
    logprobs: int
    raw_logprobs: bool
    return_logits: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., allowed_ids: _Optional[bytes] = ..., bad_ids: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., raw_logprobs: _Optional[bool] = ..., return_logits: _Optional[bool] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("slot", "name", "token_ids", "num_prompt", "num_computed", "block_ids", "seed", "choice", "sampling", "prompt_logprobs", "num_cached")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    name: str
    token_ids: bytes
    num_prompt: int
    num_computed: int
    block_ids: bytes
    seed: int
    choice: int
    sampling: RowSampling
    prompt_logprobs: int
    num_cached: int
    def __init__(self, slot: _Optional[int] = ..., name: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_prompt: _Optional[int] = ..., num_computed: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., num_cached: _Optional[int] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("epoch", "seq", "retired", "rows", "extended_slots", "extended_counts", "extended_blocks", "fed_slots", "fed_token_ids", "slots", "num_new", "held")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    retired: bytes
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    extended_slots: bytes
    extended_counts: bytes
    extended_blocks: bytes
    fed_slots: bytes
    fed_token_ids: bytes
    slots: bytes
    num_new: bytes
    held: bytes
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., retired: _Optional[bytes] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., extended_slots: _Optional[bytes] = ..., extended_counts: _Optional[bytes] = ..., extended_blocks: _Optional[bytes] = ..., fed_slots: _Optional[bytes] = ..., fed_token_ids: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., num_new: _Optional[bytes] = ..., held: _Optional[bytes] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: StepBatch
    def __init__(self, batch: _Optional[_Union[StepBatch, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "seq", "digest", "token_ids", "logprobs", "alternative_ids", "alternative_logprobs", "prompt_logprobs", "prompt_alternative_ids", "prompt_alternative_logprobs", "failed_slots", "logits_rows", "logits_dtype", "run_ms", "wait_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUN_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    digest: int
    token_ids: bytes
    logprobs: bytes
    alternative_ids: bytes
    alternative_logprobs: bytes
    prompt_logprobs: bytes
    prompt_alternative_ids: bytes
    prompt_alternative_logprobs: bytes
    failed_slots: bytes
    logits_rows: int
    logits_dtype: str
    run_ms: float
    wait_ms: float
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., digest: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., alternative_ids: _Optional[bytes] = ..., alternative_logprobs: _Optional[bytes] = ..., prompt_logprobs: _Optional[bytes] = ..., prompt_alternative_ids: _Optional[bytes] = ..., prompt_alternative_logprobs: _Optional[bytes] = ..., failed_slots: _Optional[bytes] = ..., logits_rows: _Optional[int] = ..., logits_dtype: _Optional[str] = ..., run_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ...) -> None: ...

class StepDigest(_message.Message):
    __slots__ = ("epoch", "seq", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    digest: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class LogitsPiece(_message.Message):
    __slots__ = ("epoch", "seq", "offset", "data", "shared_memory", "size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    offset: int
    data: bytes
    shared_memory: str
    size: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., shared_memory: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("result", "digest", "logits")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    result: StepResult
    digest: StepDigest
    logits: LogitsPiece
    def __init__(self, result: _Optional[_Union[StepResult, _Mapping]] = ..., digest: _Optional[_Union[StepDigest, _Mapping]] = ..., logits: _Optional[_Union[LogitsPiece, _Mapping]] = ...) -> None: ...
