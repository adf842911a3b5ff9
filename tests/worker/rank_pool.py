"""A pool of rank processes that lives as long as the test session: torch is imported once, groups are formed once.

    pool.run(2, jobs.greedy, folder, ...)   runs jobs.greedy(rank, group, folder, ...) on ranks 0 and 1; their results

A job that raises on any rank raises here with that rank's traceback. Mutants are names that the job switches on inside
the ranks (tests/worker/mutants.py), so that one pool serves mutated and honest runs alike.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120.0


class RankPool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)
        self._port: int = self._call(0, ("host",))

    def run(self, tp: int, job: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for rank in range(tp):
            self._ends[rank].send(("run", self._port, tp, job, args, kwargs))
        answers = [self._receive(rank) for rank in range(tp)]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _call(self, rank: int, message: tuple[Any, ...]) -> Any:
        self._ends[rank].send(message)
        ok, value = self._receive(rank)
        assert ok, value
        return value

    def _receive(self, rank: int) -> tuple[bool, Any]:
        if not self._ends[rank].poll(TIMEOUT_S):
            return False, f"no answer within {TIMEOUT_S} s"
        return self._ends[rank].recv()  # type: ignore[no-any-return]


def _serve(rank: int, end: Connection) -> None:
    import torch

    from worker_svc.parallel.group import GlooGroup, Group, SingleGroup, host_store, join_store

    torch.set_num_threads(1)
    store: Any = None
    groups: dict[int, Group] = {}
    while (message := end.recv()) is not None:
        try:
            if message[0] == "host":
                store = host_store("127.0.0.1", TIMEOUT_S)
                end.send((True, store.port))
                continue
            _, port, tp, job, args, kwargs = message
            if tp not in groups:
                store = store or join_store("127.0.0.1", port, TIMEOUT_S)
                alone = SingleGroup()
                groups[tp] = alone if tp == 1 else GlooGroup(store, rank, tp, tp, TIMEOUT_S, "127.0.0.1")
            end.send((True, job(rank, groups[tp], *args, **kwargs)))
        except Exception:
            end.send((False, traceback.format_exc()))
    os._exit(0)  # gloo's threads would wait for the other ranks
