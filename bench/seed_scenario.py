"""How short a schedule can be that recomputes little: `python -m bench.seed_scenario [--pools 20,24] [--waste 0.15]`.

One long decoder (4 prompt tokens, 64 new) and six arrivals (24 and 40) in a small pool of blocks of 4. Prints for each
pool the tokens and steps of the core with and without its forecast, and the fewest steps of any schedule that computes
at most (1 + waste) times the minimal 445 tokens. That number comes of an exhaustive search with perfect knowledge,
under the core's rules: waiting ones start in order of arrival, the youngest row is preempted, its full blocks stay
until somebody needs them, at most 64 tokens a step. Only states that are beaten by another in every respect, or that
cannot finish in time, are dropped. About a minute for the smallest pool, an hour for the largest.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from bench.core_bench import Answers, make_request
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler

BLOCK, BUDGET = 4, 64
PROMPTS = (4, 24, 24, 24, 24, 24, 24)
OUTPUTS = (64, 40, 40, 40, 40, 40, 40)
MINIMAL = sum(PROMPTS) + sum(OUTPUTS) - len(OUTPUTS)  # the last token of each is never fed back
POOLS = tuple(range(20, 41, 2))


@dataclass(frozen=True, slots=True)
class Run:
    tokens: int
    steps: int


def by_core(num_blocks: int, forecast: bool) -> Run:
    core = Scheduler(
        CoreConfig(num_blocks, BLOCK, max_num_seqs=8, max_batch_tokens=BUDGET, max_seq_len=100, forecast=forecast)
    )
    answers = Answers(core)
    for key, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS)):
        core.submit(make_request(key, prompt, output, stops=frozenset()), 0.0)
    while (batch := core.plan(0.0)) is not None:
        core.commit(answers.answer(batch), 0.0)
    counters = core.stats().counters
    return Run(counters.scheduled_tokens, counters.steps)


# A row is (output tokens, blocks, done): blocks > 0 and done == -1 while it runs (blocks then unused and 1), else the
# full blocks that are still there of `done` computed tokens.
Row = tuple[int, int, int]
State = tuple[Row, ...]
RUNS = -1


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _after(state: State, waste: int, num_blocks: int) -> Iterator[tuple[State, int]]:
    """Every state that one step can lead to, with what has been computed again by then."""
    rows = list(state)
    running = [i for i, row in enumerate(rows) if row[2] == RUNS]
    used = sum(_blocks(PROMPTS[i] + rows[i][0]) for i in running)
    while used > num_blocks:
        i = running.pop()  # the youngest
        used -= _blocks(PROMPTS[i] + rows[i][0])
        computed = PROMPTS[i] + rows[i][0] - 1
        rows[i] = rows[i][0], computed // BLOCK, computed
    waiting = [i for i, row in enumerate(rows) if row[2] != RUNS and row[0] < OUTPUTS[i]]
    budget = BUDGET - len(running)
    for i in running:
        rows[i] = rows[i][0] + 1, 0, RUNS
    for i in [*waiting, None]:
        yield _settled(rows, used, num_blocks), waste
        if i is None:
            return
        output, kept, done = rows[i]
        known = PROMPTS[i] + output
        found = min(kept * BLOCK, known - 1)
        used += _blocks(known)
        budget -= known - found
        if used > num_blocks or budget < 0:
            return
        waste += max(0, done - found)
        rows[i] = output + 1, 0, RUNS


def _settled(rows: list[Row], used: int, num_blocks: int) -> State:
    """Blocks of waiting rows go, the youngest's first, until everything fits; finished rows are forgotten."""
    rows = list(rows)
    over = used + sum(kept for _output, kept, _done in rows) - num_blocks
    for i in reversed(range(len(rows))):
        output, kept, done = rows[i]
        if output == OUTPUTS[i]:
            rows[i] = output, 0, 0
        elif over > 0 and kept:
            rows[i] = output, kept - min(kept, over), done
            over -= kept - rows[i][1]
    return tuple(rows)


AREAS = tuple(  # blocks x steps that a row still needs, by its output tokens
    tuple(sum(_blocks(prompt + k) for k in range(done, output)) for done in range(output + 1))
    for prompt, output in zip(PROMPTS, OUTPUTS)
)


def reachable(num_blocks: int, max_waste: int, steps: int) -> bool:
    """Whether some schedule of so few steps recomputes no more."""
    states: dict[State, int] = {tuple((0, 0, 0) for _ in PROMPTS): 0}
    end = tuple((output, 0, 0) for output in OUTPUTS)
    for step in range(1, steps + 1):
        following: dict[State, int] = {}
        for state, waste in states.items():
            for after, total in _after(state, waste, num_blocks):
                if following.get(after, max_waste + 1) <= total:
                    continue
                lost = sum(max(0, done - kept * BLOCK) for output, kept, done in after if output and done != RUNS)
                area = sum(areas[row[0]] for areas, row in zip(AREAS, after))
                longest = max(output - row[0] for output, row in zip(OUTPUTS, after))
                if total + lost <= max_waste and step + max(longest, -(-area // num_blocks)) <= steps:
                    following[after] = total
        if end in following:
            return True
        states = following
    return False


def fewest_steps(num_blocks: int, max_waste: int, at_least: int) -> int:
    steps = at_least
    while not reachable(num_blocks, max_waste, steps):
        steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", default=",".join(map(str, POOLS)), metavar="N,...")
    parser.add_argument("--waste", type=float, default=0.15, metavar="X")
    parser.add_argument("--no-search", action="store_true", help="only the core")
    parser.add_argument("--reach", type=int, metavar="STEPS", help="only say whether so few steps are possible")
    arguments = parser.parse_args()
    max_waste = int(arguments.waste * MINIMAL)
    for pool in map(int, arguments.pools.split(",")):
        naive, ours = by_core(pool, forecast=False), by_core(pool, forecast=True)
        told = f"{pool} blocks: naive {naive.tokens} tokens {naive.steps} steps, forecast {ours.tokens} {ours.steps}"
        if arguments.reach:
            told += f", {arguments.reach} steps possible: {reachable(pool, max_waste, arguments.reach)}"
        elif not arguments.no_search:
            told += f", fewest steps {fewest_steps(pool, max_waste, max(OUTPUTS))}"
        print(told, flush=True)


if __name__ == "__main__":
    main()
