"""A log of everything that was asked of a core and what it decided; the same questions give the same decisions.

    core = RecordedScheduler(config, log)     the core, each call told to `log` as one line of JSON
    python -m scheduler_svc.core.decision_log PATH     ask again and print the first difference of each file of a folder

The first line is a header: the config and, unless the log begins with the core, the state of the core. Each other line
is one call: its arguments and what came back. Logits are left out, since no decision depends on them. Knows the shape
of the core's methods and nothing of how they decide.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from protos.step import Row, RowSampling, StepBatch, StepResult
from scheduler_svc.core import snapshot
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import FinishReason, StepEvents
from scheduler_svc.core.request import Refusal, Request
from scheduler_svc.core.scheduler import Scheduler

Json = Any
SUFFIX = ".decisions"
OWN_STATE = frozenset(("_log_to", "_quiet"))  # of the recorder, not of the core


class DecisionLog(Protocol):
    """Where lines go. `write` answers whether it wants to begin anew; it is then told `begin` at once."""

    def begin(self, header: str) -> None: ...

    def write(self, line: str) -> bool: ...


class Lines(list[str]):
    """A log in memory, header first."""

    def begin(self, header: str) -> None:
        self.append(header)

    def write(self, line: str) -> bool:
        self.append(line)
        return False


class RecordedScheduler(Scheduler):
    """A core that tells `log` each call. What changes nothing (stats, invariants) is not logged."""

    def __init__(self, config: CoreConfig, log: DecisionLog) -> None:
        super().__init__(config)
        self._log_to = log
        self._quiet = False
        log.begin(json.dumps({"config": asdict(config)}))

    def submit(self, request: Request, now: float) -> None:
        refusal: Refusal | None = None
        try:
            super().submit(request, now)
        except Refusal as error:
            refusal = error
        self._log("submit", {"request": _plain(request), "now": now}, type(refusal).__name__ if refusal else None)
        if refusal is not None:
            raise refusal

    def cancel(self, key: int, now: float, choice: int | None = None) -> None:
        super().cancel(key, now, choice)
        self._log("cancel", {"key": key, "now": now, "choice": choice}, None)

    def stop(self, key: int, choice: int, num_tokens: int, now: float) -> None:
        super().stop(key, choice, num_tokens, now)
        self._log("stop", {"key": key, "choice": choice, "num_tokens": num_tokens, "now": now}, None)

    def expire(self, now: float) -> None:
        due = self.next_deadline is not None and self.next_deadline <= now
        super().expire(now)
        if due and not self._quiet:
            self._log("expire", {"now": now}, None)

    def drain(self) -> None:
        super().drain()
        self._log("drain", {}, None)

    def end_all(self, reason: FinishReason, now: float) -> None:
        super().end_all(reason, now)
        self._log("end_all", {"reason": reason.value, "now": now}, None)

    def take_events(self) -> StepEvents:
        events = super().take_events()
        if events.finished and not self._quiet:
            self._log("take_events", {}, _plain(events))
        return events

    def plan(self, now: float) -> StepBatch | None:
        self._quiet = True  # plan expires too, when it is asked again
        batch = super().plan(now)
        self._quiet = False
        self._log("plan", {"now": now}, None if batch is None else _plain(batch))
        return batch

    def commit(self, result: StepResult, now: float) -> StepEvents:
        self._quiet = True  # a late result takes events
        events = super().commit(result, now)
        self._quiet = False
        told = {name: value for name, value in _plain(result).items() if name != "logits"}
        kept = {name: value for name, value in _plain(events).items() if name != "logits"}
        self._log("commit", {"result": told, "now": now}, kept)
        return events

    def abort_step(self, epoch: int, now: float) -> None:
        super().abort_step(epoch, now)
        self._log("abort_step", {"epoch": epoch, "now": now}, None)

    def _log(self, call: str, arguments: Json, answer: Json) -> None:
        if self._log_to.write(json.dumps({"call": call, "with": arguments, "answer": answer})):
            state = snapshot.take(self, OWN_STATE)
            self._log_to.begin(json.dumps({"config": asdict(self.config), "state": state}))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out otherwise. `line` counts from 1 in the log."""

    line: int
    call: str
    field: str
    recorded: Json
    replayed: Json

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.call} differs in {self.field or 'its answer'}\n"
            f"  recorded {self.recorded}\n  replayed {self.replayed}"
        )


def replay(
    lines: Iterable[str], make: Callable[[CoreConfig, DecisionLog], RecordedScheduler] = RecordedScheduler
) -> Difference | int:
    """Ask a core what the log was asked; the number of decisions that agree, or the first that does not.

    Raises ValueError for a log whose header this version of the core cannot begin from.
    """
    told = Lines()
    core: RecordedScheduler | None = None
    number = 0
    for number, line in enumerate(lines, 1):
        entry = json.loads(line)
        if core is None:
            core = make(CoreConfig(**entry["config"]), told)
            if "state" in entry:
                snapshot.restore(core, entry["state"])
            continue
        told.clear()
        try:
            _ask(core, entry["call"], entry["with"])
        except (AssertionError, LookupError) as error:  # a step that this core never sent, a row that it does not have
            return Difference(number, entry["call"], "", entry["answer"], repr(error))
        answer = json.loads(told[-1])["answer"] if told else "<no such event>"
        if answer != entry["answer"]:
            return Difference(number, entry["call"], *_first_difference(entry["answer"], answer))
    return max(0, number - 1)


def _ask(core: RecordedScheduler, call: str, arguments: Json) -> None:
    values = dict(arguments)
    if call == "submit":
        try:
            core.submit(_request(values["request"]), values["now"])
        except Refusal:
            pass
    elif call == "commit":
        core.commit(_result(values["result"]), values["now"])
    elif call == "end_all":
        core.end_all(FinishReason(values["reason"]), values["now"])
    else:
        getattr(core, call)(**values)


def _first_difference(recorded: Json, replayed: Json, path: str = "") -> tuple[str, Json, Json]:
    """The innermost field or entry in which two answers differ."""
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        for name in recorded:
            if recorded[name] != replayed.get(name):
                return _first_difference(recorded[name], replayed.get(name), f"{path}.{name}" if path else name)
    if isinstance(recorded, list) and isinstance(replayed, list) and len(recorded) == len(replayed):
        for i, (one, other) in enumerate(zip(recorded, replayed)):
            if one != other:
                return _first_difference(one, other, f"{path}[{i}]")
    return path, recorded, replayed


def _plain(value: Any) -> Json:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, FinishReason):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (Request, RowSampling, Row, StepBatch, StepResult, StepEvents)) or hasattr(value, "__slots__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _request(plain: Json) -> Request:
    sampling = dict(plain["sampling"])
    for name in ("bias_ids", "allowed_ids", "bad_ids", "stop_ids"):
        sampling[name] = np.array(sampling[name], np.int32)
    sampling["bias_values"] = np.array(sampling["bias_values"], np.float32)
    rest = {name: value for name, value in plain.items() if name != "sampling"}
    rest["prompt"] = np.array(rest["prompt"], np.int32)
    rest["eos_ids"], rest["stop_token_ids"] = frozenset(rest["eos_ids"]), frozenset(rest["stop_token_ids"])
    rest["resume"] = tuple(np.array(tokens, np.int32) for tokens in rest["resume"])
    return Request(sampling=RowSampling(**sampling), **rest)


def _result(plain: Json) -> StepResult:
    columns = {}
    for name, value in plain.items():
        if isinstance(value, list):
            value = np.array(value, np.float32 if "logprobs" in name else np.int32)
        columns[name] = value
    return StepResult(**columns)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m scheduler_svc.core.decision_log FOLDER|FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    agreed = 0
    for file in files:
        try:
            with file.open(encoding="utf-8") as lines:
                outcome = replay(lines)
        except (ValueError, KeyError, TypeError) as error:
            print(f"{file.name}: {error}", file=sys.stderr)
            return 2
        if isinstance(outcome, Difference):
            print(f"{file.name}, {outcome}")
            return 1
        agreed += outcome
    print(f"{agreed} decisions in {len(files)} files agree")
    return 0 if agreed else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
