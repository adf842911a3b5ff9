"""A day of a million requests through the core: `python -m bench.simulate_day [--requests 1000000] [--json]`.

Arrivals follow the sun, from a tenth of the mean rate to about twice it, so that the pool runs full and the queue
overflows at noon and nothing runs at night. Requests share system prompts, a few ask for several choices, some are
cancelled, some have deadlines that pass, one row in a hundred thousand holds a NaN, and every six hours the workers
are lost. The executor answers at once; time is simulated: a step takes 160 ms and 0.2 ms a token. With fewer requests
the day is shorter and otherwise the same.

It fails unless every accepted choice gets exactly one terminal event, nothing is left over, and no block is lost.
"""

import argparse
import heapq
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from protos.step import RowSampling, StepBatch, StepResult, int32s
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import StepEvents
from scheduler_svc.core.request import Overloaded, Request
from scheduler_svc.core.scheduler import Scheduler

MEAN_GAP_S = 0.0864  # between arrivals: a million a day
STEP_S, TOKEN_S = 0.16, 0.0002
EOS = 2
VOCAB = 40  # of drawn tokens: a choice stops after about as many
SAMPLING = RowSampling(stop_ids=int32s(EOS))


@dataclass
class Day:
    requests: int = 0
    accepted: int = 0
    refused: int = 0
    choices: int = 0
    finished: dict[str, int] | None = None
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_hit_rate: float = 0.0
    most_waiting: int = 0
    longest_queue_s: float = 0.0
    epochs_lost: int = 0
    seconds: float = 0.0


class Client:
    """Makes requests, and counts the terminal events that they still have to get."""

    def __init__(self, rng: np.random.Generator, day_s: float) -> None:
        self._rng = rng
        self._day_s = day_s
        self._words = rng.integers(3, 30_000, 1 << 16).astype(np.int32)
        self.owed: dict[int, int] = {}
        self.longest_queue_s = 0.0

    def arrivals(self, count: int) -> Iterator[tuple[float, int]]:
        now = 0.0
        for key in range(count):
            rate = (1.05 - math.cos(2 * math.pi * now / self._day_s)) / MEAN_GAP_S
            now += float(self._rng.exponential(1 / rate))
            yield now, key

    def request(self, key: int, now: float) -> Request:
        rng, dice = self._rng, float(self._rng.random())
        family, own = int(rng.zipf(1.5)) % 200, int(rng.integers(1 << 15))
        shared, alone = 16 * (family % 8), 1 + int(rng.lognormal(3.0, 1.0)) % 400
        prompt = np.concatenate((self._words[family * 128 : family * 128 + shared], self._words[own : own + alone]))
        return Request(
            key,
            f"r{key}",
            prompt,
            SAMPLING,
            seed=key,
            max_tokens=1 + int(rng.lognormal(3.5, 1.0)) % 500,
            n=1 if dice > 0.05 else 2 + key % 3,
            eos_ids=frozenset({EOS}),
            priority=key % 3 - 1,
            tenant=str(family % 5),
            deadline=now + float(rng.exponential(8.0)) if 0.1 < dice < 0.2 else None,
            arrival=now,
        )

    def take(self, events: StepEvents) -> None:
        for finished in events.finished:
            left = self.owed[finished.key] - 1  # a KeyError here is an event too many
            self.longest_queue_s = max(self.longest_queue_s, finished.queue_s)
            if left:
                self.owed[finished.key] = left
            else:
                del self.owed[finished.key]


class Workers:
    """Answers with random tokens, and rarely with a NaN."""

    def __init__(self, core: Scheduler, rng: np.random.Generator) -> None:
        self._core = core
        self._rng = rng
        self._tokens = rng.integers(2, 2 + VOCAB, 1 << 16).astype(np.int32)

    def answer(self, batch: StepBatch) -> tuple[StepResult, int]:
        step = self._core._residency.in_flight[-1]
        slots = step.sampling(step.slots)
        at = int(self._rng.integers(1 << 15))
        result = StepResult(batch.epoch, batch.seq, 0, token_ids=self._tokens[at : at + len(slots)])
        if len(slots) and self._rng.random() < len(slots) * 1e-5:
            result = replace(result, failed_slots=slots[:1].astype(np.int32))
        return result, len(step.slots) if step.num_new is None else int(step.num_new.sum())


def simulate(requests: int, seed: int = 0, check_every: int = 50_000) -> Day:
    """Run a day compressed to so many requests. Raises AssertionError or KeyError when a promise is broken."""
    started = time.perf_counter()
    rng = np.random.default_rng(seed)
    core = Scheduler(
        CoreConfig(
            num_blocks=360, max_num_seqs=96, max_batch_tokens=1024, max_queue=128, pipeline_depth=2, fair_tenants=True
        )
    )
    client, workers, day = Client(rng, requests * MEAN_GAP_S), Workers(core, rng), Day(requests=requests)
    arrivals = client.arrivals(requests)
    coming = next(arrivals, None)
    cancels: list[tuple[float, int]] = []
    in_flight: list[tuple[StepResult, float]] = []
    now, quarter_s = 0.0, requests * MEAN_GAP_S / 4
    next_loss = quarter_s
    while coming is not None or core.has_work:
        while coming is not None and coming[0] <= now:
            request = client.request(coming[1], coming[0])
            try:
                core.submit(request, now)
            except Overloaded:
                day.refused += 1
            else:
                client.owed[request.key] = request.n
                day.accepted += 1
                day.choices += request.n
                if rng.random() < 0.05:
                    heapq.heappush(cancels, (now + float(rng.exponential(3.0)), request.key))
            coming = next(arrivals, None)
        while cancels and cancels[0][0] <= now:
            core.cancel(heapq.heappop(cancels)[1], now)
        if now >= next_loss:
            next_loss += quarter_s
            in_flight.clear()
            day.epochs_lost += 1
            core.abort_step(day.epochs_lost + 1, now)
        while core.can_plan and (batch := core.plan(now)) is not None:
            result, tokens = workers.answer(batch)
            in_flight.append((result, STEP_S + TOKEN_S * tokens))
            day.steps += 1
            if day.steps % check_every == 0:
                core.check_invariants()
        if in_flight:
            result, duration = in_flight.pop(0)
            now += duration
            client.take(core.commit(result, now))
        else:
            client.take(core.take_events())
            assert not core.has_work, f"stuck: {core.stats()}"
            if coming is not None:
                now = max(now, coming[0])
        day.most_waiting = max(day.most_waiting, core._residency.queue.num_sequences)
    client.take(core.take_events())
    while in_flight:  # steps of rows that had ended already
        client.take(core.commit(in_flight.pop(0)[0], now))
    core.check_invariants()
    stats, counters = core.stats(), core.stats().counters
    assert not client.owed, f"{len(client.owed)} requests never ended"
    assert stats.blocks_free + stats.blocks_cached == stats.blocks and stats.blocks_held == 0, (
        f"blocks are lost: {stats}"
    )
    assert sum(counters.finished.values()) == day.choices and stats.running == stats.waiting == 0
    day.finished, day.tokens = dict(counters.finished), counters.scheduled_tokens
    day.preemptions, day.recomputed_tokens = counters.preemptions, counters.recomputed_tokens
    day.prefix_hit_rate = round(counters.prefix_hits / max(1, counters.prefix_queries), 3)
    day.longest_queue_s, day.seconds = round(client.longest_queue_s, 1), round(time.perf_counter() - started, 1)
    return day


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    day = simulate(arguments.requests, arguments.seed)
    print(json.dumps(asdict(day)) if arguments.json else day)
    if not arguments.json:
        print("every choice ended once, no block is lost")


if __name__ == "__main__":
    main()
