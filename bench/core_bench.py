"""What the core and the codec cost a step, without a model: `python -m bench.core_bench --rows 256 [--json]`.

A steady step of N decoding rows (prompts of mixed lengths, so that a sixteenth of the rows needs a block each step),
the same with 1 % of the rows ending and as many arriving each step, and a trace of 10,000 requests with the output
lengths of the longtail64 workload against a model of ideal packing. One core, no torch; the executor answers at once.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from protos import codec
from protos import worker_pb2 as pb
from protos.step import NO_FLOATS, RowSampling, StepBatch, StepResult
from scheduler_svc.core.config import ORDERS, CoreConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

Int64s = NDArray[np.int64]
BLOCK = 16
STEADY_STEPS = 1500
EOS = frozenset({2})


def make_core(rows: int, max_seq_len: int = 32768, depth: int = 2, order: str = "arrival", **options: int) -> Scheduler:
    return Scheduler(
        CoreConfig(
            num_blocks=options.pop("num_blocks", rows * 300),
            max_num_seqs=rows,
            max_batch_tokens=max(512, 2 * rows),
            max_seq_len=max_seq_len,
            max_queue=options.pop("max_queue", 4 * rows),
            pipeline_depth=depth,
            order=order,
            **options,
        )
    )


def make_request(key: int, num_prompt: int, max_tokens: int, stops: frozenset[int] = EOS) -> Request:
    prompt = np.random.default_rng(key).integers(1000, 40000, num_prompt).astype(np.int32)
    sampling = RowSampling(temperature=0.6, stop_ids=np.array(sorted(stops), np.int32))
    return Request(key, f"r{key}", prompt, sampling, key, max_tokens, eos_ids=stops)


class Answers:
    """Results of any batch: as many tokens as rows sample. Mirrors what a worker derives from a batch, by counting."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._tokens = np.random.default_rng(0).integers(1000, 40000, 1 << 16).astype(np.int32)

    def answer(self, batch: StepBatch) -> StepResult:
        step = self._core._residency.in_flight[-1]
        count = len(step.slots) if step.samples is None else int(step.samples.sum())
        return StepResult(batch.epoch, batch.seq, 0, token_ids=self._tokens[:count], logprobs=NO_FLOATS)


@dataclass
class Timing:
    plan_commit_ms: float
    plan_ms: float
    commit_ms: float
    codec_us: float
    message_bytes: int  # of a step, without the 12 bytes of each row that needs a block
    steps_s: float
    us_a_row: float
    plan_commit_p10_ms: float  # 10th percentiles: what is left of other work's share when the machine is busy
    codec_p10_us: float


def steady(rows: int, churn: float = 0.0, steps: int = STEADY_STEPS) -> Timing:
    """Medians over many steps of one full pipeline turn: plan of a step, commit of an older one."""
    core = make_core(rows)
    answers = Answers(core)
    key = 0
    for key in range(rows):
        core.submit(make_request(key, 1 + (key * 37) % 64, 4000), 0.0)
    waiting: list[StepResult] = []
    now = 0.0
    while core.stats().waiting or core._residency.rows.prefilling or len(waiting) < 2:
        now += 1.0
        while core.can_plan and (batch := core.plan(now)) is not None:
            waiting.append(answers.answer(batch))
        core.commit(waiting.pop(0), now)
        if core.can_plan and (batch := core.plan(now)) is not None:
            waiting.append(answers.answer(batch))
    live = list(range(rows))
    plans, commits, codecs, sizes = [], [], [], []
    clock = time.perf_counter
    rng = np.random.default_rng(1)
    while len(plans) < steps:
        now += 1.0
        for _ in range(int(churn * rows + 0.5) if churn else 0):
            core.cancel(live.pop(int(rng.integers(len(live)))), now)
            key += 1
            core.submit(make_request(key, 1 + (key * 37) % 64, 4000), now)
            live.append(key)
        started = clock()
        core.commit(waiting.pop(0), now)
        committed = clock()
        batch = core.plan(now)
        planned = clock()
        assert batch is not None
        result = answers.answer(batch)
        begun = clock()
        data = codec.encode_request(batch).SerializeToString()
        codec.decode_batch(pb.StepRequest.FromString(data).batch)
        reply = codec.encode_reply(result).SerializeToString()
        codec.decode_result(pb.StepReply.FromString(reply).result, None)
        done = clock()
        waiting.append(result)
        commits.append(committed - started)
        plans.append(planned - committed)
        codecs.append(done - begun)
        sizes.append(len(data) - 12 * len(batch.extended_slots))
    turns = np.add(plans, commits)
    turn = float(np.median(turns))
    return Timing(
        plan_commit_p10_ms=round(float(np.percentile(turns, 10)) * 1e3, 4),
        codec_p10_us=round(float(np.percentile(codecs, 10)) * 1e6, 1),
        steps_s=round(1 / (turn + float(np.median(codecs)))),
        us_a_row=round(turn * 1e6 / rows, 3),
        plan_commit_ms=round(turn * 1e3, 4),
        plan_ms=round(float(np.median(plans)) * 1e3, 4),
        commit_ms=round(float(np.median(commits)) * 1e3, 4),
        codec_us=round(float(np.median(codecs)) * 1e6, 1),
        message_bytes=int(np.median(sizes)),
    )


def longtail(count: int, seed: int = 0) -> Int64s:
    """Output lengths as the longtail64 workload's: log-normal, median 1500, at most 16384."""
    outputs = np.random.default_rng(seed).lognormal(np.log(1500), 1.0, count)
    return np.clip(outputs, 16, 16384).astype(np.int64)


@dataclass
class Packing:
    requests: int
    makespan_steps: int
    ideal_steps: int  # no schedule is shorter: blocks x steps over the pool, rows x steps over the slots, the longest
    ratio: float
    started_ratio: float  # the same for the work that was done until the last request started
    last_arrivals_share: float  # of all steps, after that: the longest of the last run out, in a pool that empties
    preemptions: int
    recomputed_tokens: int
    seconds: float


def _area(num_prompt: int, outputs: Int64s) -> Int64s:
    """Blocks x steps of rows with so many output tokens: ceil((prompt + t) / BLOCK) blocks in step t."""
    whole, part = np.divmod(num_prompt + outputs - 1, BLOCK)
    prompt_blocks = num_prompt // BLOCK
    areas: Int64s = BLOCK * (whole * (whole + 1) // 2 - prompt_blocks * (prompt_blocks + 1) // 2) + part * (whole + 1)
    return areas


def pack(count: int, slots: int, num_blocks: int, num_prompt: int = 512, order: str = "arrival") -> Packing:
    """A trace of heavy-tailed requests, all there at once, through the core; how full the pool was kept."""
    lengths = longtail(count)
    core = make_core(slots, num_blocks=num_blocks, max_queue=count, depth=1, order=order)
    answers = Answers(core)
    for key, length in enumerate(lengths.tolist()):
        core.submit(make_request(key, num_prompt, length, stops=frozenset()), 0.0)
    steps, started, full_until, left = 0, time.perf_counter(), 0, 0
    while (batch := core.plan(float(steps))) is not None:
        core.commit(answers.answer(batch), float(steps))
        steps += 1
        if core._residency.queue.num_sequences:
            full_until = steps
        elif full_until == steps - 1:  # the last one has started
            rows = core._residency.rows
            live = np.flatnonzero(rows.phase)
            ends = rows.limit[live] - num_prompt
            left = int((_area(num_prompt, ends) - _area(num_prompt, rows.known[live] - num_prompt)).sum())
    area = int(_area(num_prompt, lengths).sum())
    ideal = max(area / num_blocks, lengths.sum() / slots, lengths.max())
    counters = core.stats().counters
    assert counters.finished == {"length": count} and not core.has_work
    return Packing(
        requests=count,
        makespan_steps=steps,
        ideal_steps=int(ideal),
        ratio=round(float(steps / ideal), 4),
        started_ratio=round(full_until * num_blocks / (area - left), 4),
        last_arrivals_share=round(1 - full_until / steps, 4),
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        seconds=round(time.perf_counter() - started, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only this many rows (1, 64, 256 and 1024 otherwise)")
    parser.add_argument("--trace", type=int, default=0, metavar="N", help="also pack a trace of N requests (10000)")
    parser.add_argument("--trace-blocks", type=int, default=10_000, metavar="N", help="the pool of that trace")
    parser.add_argument("--order", choices=ORDERS, default="arrival", help="of the requests of that trace")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]  # of the machine: its other work makes these figures larger
    answers = []
    for rows in [arguments.rows] if arguments.rows else [1, 64, 256, 1024]:
        answer = {"rows": rows, **asdict(steady(rows)), "churn_1_percent": asdict(steady(rows, churn=0.01, steps=400))}
        answers.append(answer)
        if not arguments.json:
            print(
                f"{rows:5} rows: plan + commit {answer['plan_commit_ms']:.3f} ms ({answer['us_a_row']:.2f} us a row), "
                f"codec {answer['codec_us']:.0f} us, {answer['steps_s']:.0f} steps/s, "
                f"{answer['message_bytes']} bytes a step beside new blocks; "
                f"1 % churn {answer['churn_1_percent']['plan_commit_ms']:.3f} ms"
            )
    result = answers[0] if arguments.rows else {"rows": answers}
    if arguments.trace:
        packing = pack(arguments.trace, slots=256, num_blocks=arguments.trace_blocks, order=arguments.order)
        result["trace"] = asdict(packing)
        if not arguments.json:
            print(packing)
    if arguments.json:
        print(json.dumps({**result, "load": round(load, 2)}))


if __name__ == "__main__":
    main()
