"""A run of the core as text: what each batch says, what each result told. For golden files that people review."""

from protos.step import StepBatch
from scheduler_svc.core.events import StepEvents
from tests.core.engine import Bench


def describe_batch(batch: StepBatch) -> str:
    """One line a batch; a row that is not named computes one token."""
    parts = [f"step {batch.epoch}.{batch.seq}"]
    if len(batch.retired):
        parts.append(f"retire {batch.retired.tolist()}")
    for row in batch.rows:
        cached = f" cached {row.num_cached}" if row.num_cached else ""
        parts.append(
            f"introduce {row.name} in {row.slot}: {len(row.token_ids)} tokens{cached} blocks {row.block_ids.tolist()}"
        )
    at = 0
    for slot, count in zip(batch.extended_slots.tolist(), batch.extended_counts.tolist()):
        parts.append(f"extend {slot} by {batch.extended_blocks[at : at + count].tolist()}")
        at += count
    if len(batch.fed_slots):
        parts.append(f"feed {dict(zip(batch.fed_slots.tolist(), batch.fed_token_ids.tolist()))}")
    for slot, count in zip(batch.slots.tolist(), batch.num_new.tolist()):
        parts.append(f"compute {count} of {slot}")
    if len(batch.held):
        parts.append(f"hold {batch.held.tolist()}")
    return "; ".join(parts)


def describe_events(bench: Bench, events: StepEvents) -> str:
    names = {key: request.request_id for key, request in bench.requests.items()}
    tokens = events.tokens
    told = [
        f"{names[key]}{f'/{choice}' if bench.requests[key].n > 1 else ''}={token}"
        for key, choice, token in zip(tokens.keys.tolist(), tokens.choices.tolist(), tokens.token_ids.tolist())
    ]
    told += [
        f"{names[s.key]} scores {s.first_position}..{s.first_position + len(s.logprobs) - 1}" for s in events.scores
    ]
    told += [
        f"{names[f.key]}{f'/{f.choice}' if bench.requests[f.key].n > 1 else ''} ends: {f.reason.value} "
        f"after {f.completion_tokens}, {f.cached_tokens} cached"
        for f in events.finished
    ]
    return "    " + (", ".join(told) or "nothing to tell")


class Teller:
    """Plans and commits a bench, keeping the story."""

    def __init__(self, bench: Bench, title: str) -> None:
        self.bench = bench
        self.lines = [title, ""]
        bench.fake.keep_batches = True

    def say(self, text: str) -> None:
        self.lines.append(f"-- {text}")

    def plan(self) -> None:
        batch = self.bench.plan()
        self.lines.append(describe_batch(batch) if batch is not None else "no step")

    def commit(self) -> None:
        result = self.bench.waiting.popleft()
        self.bench.fake.finish(result.seq)
        events = self.bench.core.commit(result, self.bench.now)
        self.bench.verify()
        self.bench.take(events)
        self.lines.append(describe_events(self.bench, events))

    def go_on(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            while self.bench.core.can_plan:
                before = self.bench.core.num_in_flight
                self.plan()
                if self.bench.core.num_in_flight == before:
                    self.lines.pop()
                    break
            if not self.bench.waiting:
                break
            self.commit()

    def text(self) -> str:
        stats = self.bench.core.stats()
        counters = stats.counters
        self.lines += [
            "",
            f"{counters.steps} steps, {counters.scheduled_tokens} tokens, {counters.preemptions} preemptions, "
            f"{counters.discarded_tokens} discarded; {stats.blocks_free} blocks free, {stats.blocks_cached} cached",
        ]
        return "\n".join(self.lines) + "\n"
