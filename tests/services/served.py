"""The real service on a loopback port, in this process, over the pseudo-model: what most tests of the API talk to."""

import asyncio
import socket
import threading
import time

import grpc
import uvloop

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from scheduler_svc.app import SchedulerConfig, SchedulerServer
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.engine_process import EngineStart, EngineThread
from scheduler_svc.workers import WorkerGroup
from tests.services.pseudo import Pseudo, write_tokenizer

DEFAULTS = dict(max_num_seqs=16, max_batch_tokens=64, max_seq_len=64, max_queue=64, check_invariants=True)


class Served:
    """A context manager. `model` is the Pseudo; `engine` are fields of EngineConfig, `config` of SchedulerConfig."""

    def __init__(self, folder, model=None, config=None, **engine):
        self.model = model if model is not None else Pseudo()
        self.model.folder = str(write_tokenizer(folder))
        self._config = SchedulerConfig(
            listen="127.0.0.1:0",
            workers=WorkerGroup(("in-process:0",)),
            engine=EngineConfig(**{**DEFAULTS, **engine}),
            **(config or {}),
        )
        self._up = threading.Event()
        self.exit_code = None

    def __enter__(self):
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(20)
        self.address = f"127.0.0.1:{self.server.port}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.GenerationStub(self.channel)
        if not self.model.down:
            self.wait_state("serving")
        return self

    def __exit__(self, *_):
        self.model.go()
        self.channel.close()
        if self._thread.is_alive():
            self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server does not end"

    def _serve(self):
        start = EngineStart(self._config.engine, lambda: self.model)

        def make_engine(on_notices, on_end):
            self.engine = EngineThread(start, on_notices, on_end)
            return self.engine

        async def main():
            self.loop = asyncio.get_running_loop()
            self.server = SchedulerServer(self._config, make_engine)
            self.loop.create_task(self._tell_up())
            return await self.server.run(handle_signals=False)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.exit_code = runner.run(main())
        self._up.set()

    async def _tell_up(self):
        while not self.server.port:
            await asyncio.sleep(0.001)
        self._up.set()

    def stop(self):
        """What SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server.stop)

    # What tests ask

    def generate(self, message=None, *, timeout=20, **fields):
        """All events of one request."""
        message = message if message is not None else request(**fields)
        return list(self.stub.Generate(message, timeout=timeout))

    def refused(self, message=None, **fields):
        """The error of a request that must not be admitted; no event comes before it."""
        events = []
        try:
            for event in self.stub.Generate(message if message is not None else request(**fields), timeout=20):
                events.append(event)
        except grpc.RpcError as error:
            assert not events, events
            return error
        raise AssertionError(f"it was admitted: {events[:2]}")

    def stats(self):
        return self.stub.Stats(pb.StatsRequest(), timeout=5)

    def wait_state(self, state, timeout_s=10.0):
        wait_until(lambda: self.stats().state == state, timeout_s)

    def wait_idle(self, timeout_s=10.0):
        """Every block is free or cached again, nothing runs, nothing waits."""

        def idle():
            values = self.stats().values
            names = ("requests_running", "requests_waiting", "requests_live", "kv_blocks_held")
            blocks = values["kv_blocks_free"] + values["kv_blocks_cached"]
            return not any(values[name] for name in names) and blocks == values["kv_blocks"]

        wait_until(idle, timeout_s)


def request(prompt=(1, 2, 3), *, text=None, chat=None, request_id=None, resume=None, **fields):
    """A GenerateRequest; fields of the request by name, everything else is a sampling field."""
    message = pb.GenerateRequest()
    if request_id is not None:
        message.request_id = request_id
    for name in ("timeout_ms", "priority", "tenant", "cache_salt", "expected_fingerprint"):
        if name in fields:
            setattr(message, name, fields.pop(name))
    if text is not None:
        message.text = text
    elif chat is not None:
        for role, content in chat:
            message.chat.messages.add(role=role, content=content)
    elif prompt is not None:
        message.token_ids.ids.extend(prompt)
    if resume is not None:
        seed, choices = resume
        if seed is not None:
            message.resume.seed = seed
        for tokens in choices:
            message.resume.choices.add(token_ids=tokens)
    message.sampling.CopyFrom(pb.SamplingParams(**fields))
    return message


def tokens(events, index=0):
    return [token for event in events if event.index == index for token in event.token_ids]


def text(events, index=0):
    return "".join(event.text for event in events if event.index == index)


def logprobs(events, index=0):
    return [value for event in events if event.index == index for value in event.logprobs]


def finish(events, index=0):
    found = [event.finish for event in events if event.index == index and event.HasField("finish")]
    assert len(found) == 1, f"{len(found)} finishes"
    return found[0]


def usage(events):
    assert events[-1].HasField("usage") and not any(event.HasField("usage") for event in events[:-1])
    return events[-1].usage


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
