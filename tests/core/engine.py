"""A core and a fake executor joined by a loop of a few lines, with what each request was told, and nothing lost."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos.step import RowSampling, StepBatch, StepResult
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import Finished, StepEvents
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from tests.core.fake import FakeExecutor, solo


@dataclass
class Told:
    """What the caller of one choice has seen."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    logits: int = 0


class Bench:
    """Args: core and fake options; `check` runs every invariant after every call."""

    def __init__(self, *, check: bool = True, scheduler: type[Scheduler] = Scheduler, **options: Any) -> None:
        fake = {name: options.pop(name) for name in ("strict", "poisoned", "vocab") if name in options}
        options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_batch_tokens": 32, **options}
        self.config = CoreConfig(**options)
        self.core = scheduler(self.config)
        self.fake = FakeExecutor(
            self.config.num_blocks,
            self.config.block_size,
            self.config.max_num_seqs,
            sample_at_scheduler=self.config.sample_at_scheduler,
            **fake,
        )
        self.told: dict[tuple[int, int], Told] = {}
        self.requests: dict[int, Request] = {}
        self.stopped: set[tuple[int, int]] = set()  # choices that a test ended by `stop`
        self.waiting: deque[StepResult] = deque()
        self.now = 0.0
        self.check = check
        self._next_key = 1

    def request(self, prompt: Any, max_tokens: int = 8, **options: Any) -> Request:
        """A request under a fresh key; an int prompt is that many random tokens."""
        key = self._next_key
        self._next_key += 1
        if isinstance(prompt, int):
            prompt = np.random.default_rng(key).integers(0, 97, prompt)
        prompt = np.asarray(prompt, np.int32)
        sampling = {name: options.pop(name) for name in RowSampling.__slots__ if name in options}
        stops = sorted(options.get("eos_ids", frozenset()) | options.get("stop_token_ids", frozenset()))
        sampling.setdefault("stop_ids", np.array(stops, np.int32))
        options = {"seed": key, "request_id": f"r{key}", **options}
        return Request(key=key, prompt=prompt, max_tokens=max_tokens, sampling=RowSampling(**sampling), **options)

    def submit(self, prompt: Any, max_tokens: int = 8, **options: Any) -> int:
        request = prompt if isinstance(prompt, Request) else self.request(prompt, max_tokens, **options)
        self.core.submit(request, self.now)
        self.requests[request.key] = request
        for choice in range(request.n):
            self.told[request.key, choice] = Told()
        self.take(self.core.take_events())
        return request.key

    def plan(self) -> StepBatch | None:
        self.now += 1.0
        batch = self.core.plan(self.now)
        self.verify()
        if batch is not None:
            result = self.fake.run(batch)
            self.waiting.append(self.fake.sample(result) if self.config.sample_at_scheduler else result)
        return batch

    def commit(self) -> StepEvents:
        result = self.waiting.popleft()
        self.fake.finish(result.seq)
        events = self.core.commit(result, self.now)
        self.verify()
        self.take(events)
        return events

    def step(self) -> bool:
        """Plan as far as the pipeline allows, then commit one step; False when there is nothing to do."""
        while self.core.can_plan and self.plan() is not None:
            pass
        if not self.waiting:
            assert not self.core.has_work, f"stuck: {self.core.stats()}"
            self.take(self.core.take_events())
            return False
        self.commit()
        return True

    def run(self, max_steps: int = 100_000) -> int:
        """Until idle; the number of steps."""
        steps = 0
        while self.step():
            steps += 1
            assert steps <= max_steps, f"no end after {steps} steps: {self.core.stats()}"
        self.assert_idle()
        return steps

    def lose_workers(self) -> None:
        self.waiting.clear()
        self.fake.restart()
        self.core.abort_step(self.core._epoch + 1, self.now)
        self.verify()

    def cancel(self, key: int, choice: int | None = None) -> None:
        self.core.cancel(key, self.now, choice)
        self.verify()
        self.take(self.core.take_events())

    def verify(self) -> None:
        if self.check:
            self.core.check_invariants()

    def take(self, events: StepEvents) -> None:
        tokens = events.tokens
        for key, choice, token, logprob in zip(
            tokens.keys.tolist(), tokens.choices.tolist(), tokens.token_ids.tolist(), tokens.logprobs.tolist()
        ):
            told = self.told[key, choice]
            assert not told.finished, "a token after the end"
            told.tokens.append(token)
            told.logprobs.append(logprob)
        for scores in events.scores:
            told = self.told[scores.key, 0]
            assert scores.first_position == len(told.scores) + 1, "each score arrives once, in order"
            told.scores += scores.logprobs.tolist()
        for row in events.logits:
            self.told[row.key, row.choice].logits += 1
        for finished in events.finished:
            told = self.told[finished.key, finished.choice]
            assert not told.finished, "two terminal events"
            told.finished.append(finished)

    def output(self, key: int, choice: int = 0) -> list[int]:
        """All output tokens, resumed ones first."""
        request = self.requests[key]
        return [*(request.resume[choice].tolist() if request.resume else []), *self.told[key, choice].tokens]

    def reason(self, key: int, choice: int = 0) -> str:
        (finished,) = self.told[key, choice].finished
        return finished.reason.value

    def assert_solo(self, *keys: int) -> None:
        """Each choice of these (all) requests got exactly what it gets alone."""
        for key in keys or self.requests:
            for choice in range(self.requests[key].n):
                tokens, reason = solo(self.requests[key], choice, self.fake.vocab)
                assert self.output(key, choice) == tokens, f"request {key} choice {choice}"
                assert self.reason(key, choice) == reason
                (finished,) = self.told[key, choice].finished
                assert finished.completion_tokens == len(tokens)

    def assert_idle(self) -> None:
        """Every block is back, nothing runs or waits, every choice ended once."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.steps_in_flight, stats.waiting_tokens) == (0, 0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks and stats.blocks_held == 0
        assert all(len(told.finished) == 1 for told in self.told.values())
