"""What a core is built with: sizes that the group of workers answered, bounds and policies that the operator chose."""

from dataclasses import dataclass

ORDERS = ("arrival", "makespan")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Everything is checked here, once; a core with this config needs to ask nobody else.

    Args:
        num_blocks, block_size: the KV pool.
        max_num_seqs: slots. A decode row costs one token of a step, so no more rows than `max_batch_tokens` run.
        max_batch_tokens: tokens of one step, over all rows.
        max_seq_len: prompt and output of one choice.
        max_queue, max_queued_tokens: bounds on what waits beyond the free slots; a request counts once per choice.
        pipeline_depth: steps that may be in flight.
        sample_at_scheduler: tokens are drawn outside the workers and fed with the next batch; needs depth 1.
        prefix_cache: full blocks are found by content, live ones and those of ended sequences. Off: nothing is shared.
        model_version: tells the blocks of one set of weights from another's.
        ageing_s: waiting this long is worth one level of priority. 0: priorities are absolute.
        order: of waiting choices of one priority. "arrival", or "makespan": the same, but one that would outlast all
            other work starts before its turn, so that a backlog ends early; it passes those that came at most ageing_s
            before it.
        fair_tenants: tenants take turns by the tokens they were given; priorities then order within a tenant.
        forecast: admit only what is seen to fit to its end; off: what fits now.
        watermark: share of the pool that admission leaves free while something runs.
        epoch: of the first batch.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_seq_len: int = 2048
    max_queue: int = 1024
    max_queued_tokens: int = 1 << 24
    pipeline_depth: int = 1
    sample_at_scheduler: bool = False
    prefix_cache: bool = True
    model_version: str = ""
    ageing_s: float = 60.0
    order: str = "arrival"
    fair_tenants: bool = False
    forecast: bool = True
    watermark: float = 0.0
    epoch: int = 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens", "max_seq_len", "pipeline_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("max_queue", "max_queued_tokens", "ageing_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative")
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}; it is one of {', '.join(ORDERS)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it is a share below 1")
        if self.sample_at_scheduler and self.pipeline_depth > 1:
            raise ValueError("sampling at the scheduler needs each step's logits, so pipeline_depth is 1")

    @property
    def num_slots(self) -> int:
        """Rows that may run at once: each needs a slot and, decoding, a token of every step."""
        return min(self.max_num_seqs, self.max_batch_tokens)

    @property
    def max_blocks_per_row(self) -> int:
        return min(self.num_blocks, -(-self.max_seq_len // self.block_size))
