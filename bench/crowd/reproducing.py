"""A difference as a file: the set-up, the crowd and the request that was told something else. Small, and run again."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from bench.crowd.deployments import Deployment
from bench.crowd.driving import Arrival
from protos import generation_pb2 as pb

TRIALS = 12  # crowds that the search for a smaller one may run


@dataclass(frozen=True)
class Reproducer:
    """`model` names a tiny family with its overrides, or a folder."""

    model: dict[str, Any]
    max_len: int
    deployment: Deployment
    arrivals: tuple[Arrival, ...]
    suspect: str  # request id
    difference: str

    def write(self, path: Path) -> None:
        arrivals = [
            {
                "request": json_format.MessageToDict(arrival.request),
                "pause_s": arrival.pause_s,
                "cancel_after_s": arrival.cancel_after_s,
            }
            for arrival in self.arrivals
        ]
        path.write_text(
            json.dumps(
                {
                    "model": self.model,
                    "max_len": self.max_len,
                    "deployment": asdict(self.deployment),
                    "suspect": self.suspect,
                    "difference": self.difference,
                    "arrivals": arrivals,
                },
                indent=1,
            )
        )

    @staticmethod
    def read(path: Path) -> "Reproducer":
        data = json.loads(path.read_text())
        arrivals = tuple(
            Arrival(json_format.ParseDict(one["request"], pb.GenerateRequest()), one["pause_s"], one["cancel_after_s"])
            for one in data["arrivals"]
        )
        deployment = Deployment(**data["deployment"])
        return Reproducer(data["model"], data["max_len"], deployment, arrivals, data["suspect"], data["difference"])


def shrink(arrivals: Sequence[Arrival], suspect: str, differs: Callable[[Sequence[Arrival]], bool]) -> list[Arrival]:
    """Halve the company of the suspect while it still differs; at worst what was given.

    Args:
        differs: runs a crowd and says whether the suspect was told something else than alone.
    """
    smallest = list(arrivals)
    for _ in range(TRIALS):
        company = [arrival for arrival in smallest if arrival.request.request_id != suspect]
        for half in (company[: len(company) // 2], company[len(company) // 2 :]) if company else ():
            trial = [a for a in smallest if a.request.request_id == suspect or a in half]
            if len(trial) < len(smallest) and differs(trial):
                smallest = trial
                break
        else:
            break
    return smallest
