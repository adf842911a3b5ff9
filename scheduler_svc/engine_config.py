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
    pipeline_depth: int = 2
    sample_at_scheduler: bool = False
    prefix_cache: bool = True
    forecast: bool = True
    step_timeout_s: float = 30.0
    recovery_timeout_s: float = 120.0
    check_invariants: bool = False
    decision_log: str = ""  # a file that is written anew; empty: none
