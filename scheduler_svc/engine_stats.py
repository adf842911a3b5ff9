"""What the engine loop counts, under its public names (metrics.py and docs/api.md). Plain numbers in and out."""

from dataclasses import dataclass

from scheduler_svc.core.stats import Stats


@dataclass(slots=True)
class StepCounters:
    """Sums since the start, told as they are."""

    steps: int = 0
    recoveries: int = 0
    late_results: int = 0
    plan_s: float = 0.0
    commit_s: float = 0.0
    worker_run_s: float = 0.0
    worker_wait_s: float = 0.0
    step_s: float = 0.0
    idle_s: float = 0.0

    def values(self) -> dict[str, float]:
        return {
            "steps_total": self.steps,
            "digests_agreed_total": self.steps,
            "recoveries_total": self.recoveries,
            "late_results_total": self.late_results,
            'step_seconds_total{phase="plan"}': self.plan_s,
            'step_seconds_total{phase="commit"}': self.commit_s,
            'step_seconds_total{phase="round_trip"}': self.step_s,
            'step_seconds_total{phase="worker_run"}': self.worker_run_s,
            'step_seconds_total{phase="worker_wait"}': self.worker_wait_s,
            'step_seconds_total{phase="idle"}': self.idle_s,
        }


def core_values(stats: Stats) -> dict[str, float]:
    """The core's figures under their public names."""
    counters = stats.counters
    values: dict[str, float] = {
        "requests_running": stats.running,
        "requests_waiting": stats.waiting,
        "waiting_tokens": stats.waiting_tokens,
        "kv_blocks": stats.blocks,
        "kv_blocks_free": stats.blocks_free,
        "kv_blocks_cached": stats.blocks_cached,
        "kv_blocks_held": stats.blocks_held,
        "kv_cache_usage_ratio": 1 - (stats.blocks_free + stats.blocks_cached) / max(1, stats.blocks),
        "prefix_cache_queries_total": counters.prefix_queries,
        "prefix_cache_hits_total": counters.prefix_hits,
        "preemptions_total": counters.preemptions,
        "recomputed_tokens_total": counters.recomputed_tokens,
        "discarded_tokens_total": counters.discarded_tokens,
        "scheduled_tokens_total": counters.scheduled_tokens,
        "scheduled_prompt_tokens_total": counters.scheduled_prompt_tokens,
    }
    return values | {f'requests_waiting_by_reason{{reason="{why}"}}': n for why, n in stats.waiting_for.items()}
