"""The engine in one process, behind the face of a driver: a child that holds an `Engine` and takes crowds on its stdin.

parent: {"requests": [[pause_s, base64 GenerateRequest], ..]}
child:  [{"events": [base64 GenerateEvent, ..], "refusal": ".."}, ..]
"""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.crowd.answers import Answer
from bench.crowd.driving import Arrival
from protos import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
READY = "engine: ready"


class EmbeddedDriver:
    """A running child. Leaves no process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.crowd.embedded", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.text = "an engine in one process"

    def __enter__(self) -> "EmbeddedDriver":
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != READY:
            self.__exit__(AssertionError)
            raise AssertionError("the embedded engine did not start")
        return self

    def __exit__(self, type_: object = None, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        code = self._child.wait(60)
        if type_ is None:
            assert code == 0, f"the embedded engine ended with {code}"

    def close(self) -> None:
        pass

    def crowd(self, arrivals: Sequence[Arrival]) -> Mapping[str, Answer]:
        """As Driver.crowd; who would be cancelled is not even asked."""
        kept = [arrival for arrival in arrivals if arrival.cancel_after_s is None]
        packed = [[a.pause_s, base64.b64encode(a.request.SerializeToString()).decode()] for a in kept]
        answers = {}
        for arrival, told in zip(kept, self._ask({"requests": packed})):
            answer = answers[arrival.request.request_id] = Answer()
            for event in told["events"]:
                answer.take(pb.GenerateEvent.FromString(base64.b64decode(event)))
            if told["refusal"]:
                answer.refusal, answer.ended = told["refusal"], True
        return answers

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = self._ask({"stats": True})
        return stats

    def _ask(self, message: Mapping[str, Any]) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(json.dumps(message), file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())


def main() -> None:
    from scheduler_svc import Engine
    from scheduler_svc.embedded import RequestFailed

    with Engine(**json.loads(sys.argv[1])) as engine:
        print(READY, flush=True)
        for line in sys.stdin:
            message = json.loads(line)
            if "stats" in message:
                print(json.dumps(engine.stats()), flush=True)
                continue
            streams: list[Any] = []
            for pause_s, packed in message["requests"]:
                time.sleep(pause_s)
                try:
                    streams.append(engine.stream(pb.GenerateRequest.FromString(base64.b64decode(packed))))
                except RequestFailed as failure:
                    streams.append(failure)
            told = []
            for stream in streams:
                events, refusal = [], ""
                try:
                    if isinstance(stream, RequestFailed):
                        raise stream
                    events = [base64.b64encode(event.SerializeToString()).decode() for event in stream]
                except RequestFailed as failure:
                    refusal = f"{failure.code}: {failure.message}"
                told.append({"events": events, "refusal": refusal})
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
