"""What the operator chose for the engine loop; validated in app.py, passed as it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the operator chose; sizes of 0 are found out (num_blocks from memory, max_seq_len from the model)."""

    block_size: int = 16
    num_blocks: int = 0
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_seq_len: int = 0
    max_queue: int = 1024
    max_queued_tokens: int = 1 << 24
    pipeline_depth: int = 2
    sample_at_scheduler: bool = False
    prefix_cache: bool = True
    forecast: bool = True
    watermark: float = 0.0
    ageing_s: float = 60.0
    order: str = "arrival"
    fair_tenants: bool = False
    step_timeout_s: float = 30.0
    recovery_timeout_s: float = 120.0
    check_invariants: bool = False
    decision_log: str = ""  # a folder; empty: none
    decision_log_bytes: int = 256 << 20  # what it may grow to
