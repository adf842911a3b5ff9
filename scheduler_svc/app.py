"""`lockstep-scheduler`: the composition root. Flags become one frozen config, parts are built here and only here.

    bind the port -> start the engine process -> serve when the workers do -> SIGTERM: drain -> exit

Exit codes: 0 after a drain; 1 when the engine process ended; 2 for options that contradict each other, the model or the
memory of the workers; 3 for a port that is taken; 130 at the second signal.
"""

import argparse
import asyncio
import functools
import gc
import importlib.util
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos.worker_link import SECRET_VARIABLE
from scheduler_svc import limits, logs
from scheduler_svc.calls import Calls
from scheduler_svc.core.config import ORDERS
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.engine_process import Engine, EngineProcess, EngineStart
from scheduler_svc.front_end import FrontEnd
from scheduler_svc.malformed import RefuseMalformed
from scheduler_svc.messages import EngineState, Notice
from scheduler_svc.metrics import Metrics, serve_metrics
from scheduler_svc.observer import Observer
from scheduler_svc.security import BearerTokens, TlsFiles, read_tokens
from scheduler_svc.service import GenerationService, Health, add_services
from scheduler_svc.workers import WorkerGroup
from worker_svc import launch

logger = logging.getLogger(__name__)

READY_MARK = "lockstep-scheduler: serving"  # lockstep-up waits for it
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
EXIT_ENGINE, EXIT_OPTIONS, EXIT_PORT, EXIT_AT_ONCE = 1, 2, 3, 130
LAST_WORDS_S = 2.0  # for final events on their way out


MakeEngine = Callable[[Callable[[Sequence[Notice]], object], Callable[[int], object]], Engine]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    listen: str
    workers: WorkerGroup
    engine: EngineConfig
    drain_timeout_s: float = 30.0
    tokenizer: Path | None = None
    metrics: tuple[str, int] | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    tokens: tuple[str, ...] = ()
    openai: bool = False
    traces: str | None = None
    trace_share: float = 1.0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="lockstep-scheduler", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = found.add_argument
    add("--workers", required=True, metavar="HOST:PORT,...", help="the ranks of one group, rank 0 first")
    add("--listen", default="127.0.0.1:50051", metavar="HOST:PORT")
    add("--tokenizer", type=Path, metavar="DIR", help="default: the model folder that the workers name")
    add("--sample-at", choices=("worker", "scheduler"), default="worker")
    add("--kv-blocks", type=int, default=0, metavar="N", help="default: as many as fit on the smallest rank")
    add("--block-size", type=int, default=16, metavar="N")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="choices that run at once")
    add("--max-batch-tokens", type=int, default=512, metavar="N", help="tokens of one step")
    add("--max-seq-len", type=int, default=0, metavar="N", help="prompt and output; default: the model's positions")
    add("--max-queue", type=int, default=1024, metavar="N", help="choices that may wait")
    add("--max-queued-tokens", type=int, default=1 << 24, metavar="N", help="prompt tokens that may wait")
    add("--pipeline-depth", type=int, default=2, metavar="N", help="steps in flight")
    add("--no-prefix-cache", action="store_true", help="share no keys and values between requests")
    add("--no-forecast", action="store_true", help="admit what fits now, and preempt when the pool is full")
    add("--watermark", type=float, default=0.0, metavar="X", help="share of the pool that new choices leave free")
    add("--ageing", type=float, default=60.0, metavar="S", help="waiting so long is worth one priority; 0: nothing is")
    add("--order", choices=ORDERS, default="arrival", help="makespan: what would outlast all else starts in time")
    add("--fair-tenants", action="store_true", help="tenants take turns by the tokens that they were given")
    add("--step-timeout", type=float, default=30.0, metavar="S", help="a step that takes longer ends the epoch")
    add(
        "--form-timeout",
        type=float,
        metavar="S",
        help="for a group to form; default: 30, with GPUs 120 (kernels compile)",
    )
    add("--recovery-timeout", type=float, default=120.0, metavar="S", help="then streams end with UNAVAILABLE")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="what running requests get at SIGTERM")
    add("--metrics", metavar="HOST:PORT", help="a Prometheus endpoint")
    add("--metrics-port", type=int, metavar="PORT", help="the same on the host of --listen")
    add("--tokens-file", type=Path, metavar="FILE", help="bearer tokens that may call, one a line")
    add("--tls-cert", type=Path, metavar="FILE", help="with --tls-key: TLS for clients")
    add("--tls-key", type=Path, metavar="FILE")
    add("--tls-client-ca", type=Path, metavar="FILE", help="clients must show a certificate of it")
    add("--worker-tls-ca", type=Path, metavar="FILE", help="whose certificates the workers must show")
    add("--worker-tls-cert", type=Path, metavar="FILE", help="with --worker-tls-key: shown to the workers")
    add("--worker-tls-key", type=Path, metavar="FILE")
    add("--openai", action="store_true", help="serve vllm.grpc.engine.VllmEngine too, for the gateway smg")
    add("--traces", metavar="URL", help="an OTLP collector over gRPC, e.g. http://localhost:4317")
    add("--trace-share", type=float, default=1.0, metavar="X", help="of requests whose callers do not trace")
    add("--log-format", choices=("text", "json"), default="text")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--record", type=Path, metavar="DIR", help="write the step stream for lockstep-replay; it holds token ids")
    add("--record-mib", type=int, default=256, metavar="N", help="what that folder may grow to; old files go first")
    add("--decision-log", type=Path, metavar="DIR", help="write every decision of the core, to be replayed")
    add("--decision-log-mib", type=int, default=256, metavar="N", help="what that folder may grow to")
    add("--check-invariants", action="store_true", help="check the core after every step; slow")
    return found


def configure(arguments: Sequence[str] | None = None) -> tuple[SchedulerConfig, argparse.Namespace]:
    """The validated config; ends the process with a usage message for options that contradict each other."""
    usage = parser()
    options = usage.parse_args(arguments)
    workers = tuple(address for address in options.workers.split(",") if address)
    for address in (*workers, options.listen):
        if not address.rpartition(":")[2].isdigit():
            usage.error(f"{address!r} is no HOST:PORT")
    if not workers:
        usage.error("--workers names no worker")
    if bool(options.tls_cert) != bool(options.tls_key):
        usage.error("--tls-cert and --tls-key go together")
    if options.tls_client_ca and not options.tls_cert:
        usage.error("--tls-client-ca needs --tls-cert and --tls-key")
    if bool(options.worker_tls_cert) != bool(options.worker_tls_key):
        usage.error("--worker-tls-cert and --worker-tls-key go together")
    for name in ("block_size", "max_num_seqs", "max_batch_tokens", "pipeline_depth"):
        if getattr(options, name) < 1:
            usage.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1 is needed")
    if options.form_timeout is not None and options.form_timeout <= 0:
        usage.error(f"--form-timeout is {options.form_timeout:g}; it must be above 0")
    for name in (
        *("kv_blocks", "max_seq_len", "max_queue", "max_queued_tokens", "ageing"),
        *("drain_timeout", "step_timeout", "recovery_timeout"),
    ):
        if not 0 <= getattr(options, name) < math.inf:
            usage.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it cannot be negative or endless")
    if not 0 <= options.watermark < 1:
        usage.error(f"--watermark is {options.watermark:g}; it is a share below 1")
    if options.decision_log_mib < 1:
        usage.error(f"--decision-log-mib is {options.decision_log_mib}; at least 1 is needed")
    if options.openai and importlib.util.find_spec("smg_grpc_proto") is None:
        usage.error("--openai needs the extra: pip install 'lockstep[openai]'")
    if options.traces and importlib.util.find_spec("opentelemetry") is None:
        usage.error("--traces needs the extra: pip install 'lockstep[otel]'")
    if not 0 <= options.trace_share <= 1:
        usage.error(f"--trace-share is {options.trace_share:g}; it is a share")
    try:
        tokens = read_tokens(options.tokens_file) if options.tokens_file else ()
    except (OSError, ValueError) as error:
        usage.error(f"--tokens-file: {error}")
    config = SchedulerConfig(
        listen=options.listen,
        workers=WorkerGroup(
            workers,
            os.environ.get(SECRET_VARIABLE),
            TlsFiles(options.worker_tls_cert, options.worker_tls_key, options.worker_tls_ca),
            options.sample_at == "scheduler",
            options.record,
            options.record_mib << 20,
            options.form_timeout,
        ),
        engine=EngineConfig(
            block_size=options.block_size,
            num_blocks=options.kv_blocks,
            max_num_seqs=options.max_num_seqs,
            max_batch_tokens=options.max_batch_tokens,
            max_seq_len=options.max_seq_len,
            max_queue=options.max_queue,
            max_queued_tokens=options.max_queued_tokens,
            pipeline_depth=options.pipeline_depth,
            sample_at_scheduler=options.sample_at == "scheduler",
            prefix_cache=not options.no_prefix_cache,
            forecast=not options.no_forecast,
            watermark=options.watermark,
            ageing_s=options.ageing,
            order=options.order,
            fair_tenants=options.fair_tenants,
            step_timeout_s=options.step_timeout,
            recovery_timeout_s=options.recovery_timeout,
            check_invariants=options.check_invariants,
            decision_log=str(options.decision_log or ""),
            decision_log_bytes=options.decision_log_mib << 20,
        ),
        drain_timeout_s=options.drain_timeout,
        tokenizer=options.tokenizer,
        metrics=_metrics_address(options, usage),
        tls=TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca),
        tokens=tokens,
        openai=options.openai,
        traces=options.traces,
        trace_share=options.trace_share,
    )
    return config, options


def _metrics_address(options: argparse.Namespace, usage: argparse.ArgumentParser) -> tuple[str, int] | None:
    if options.metrics:
        host, _, port = options.metrics.rpartition(":")
        if not port.isdigit():
            usage.error(f"{options.metrics!r} is no HOST:PORT")
        return host, int(port)
    if options.metrics_port is not None:
        return options.listen.rpartition(":")[0], options.metrics_port
    return None


class SchedulerServer:
    """The running service of one event loop. `run` returns the exit code; `stop` is what a signal does.

    Args:
        make_engine: starts the engine, which calls back from threads of its own: EngineProcess or EngineThread.
    """

    def __init__(self, config: SchedulerConfig, make_engine: MakeEngine) -> None:
        self._config = config
        self._make_engine = make_engine
        self._signals = 0
        self._ending = asyncio.Event()
        self._idle = asyncio.Event()
        self._exit_code = 0
        self._announced = False
        self._told_reason = ""
        self._closing: list[Callable[[], None]] = []
        self.port = 0

    async def run(self, handle_signals: bool = True) -> int:
        loop = asyncio.get_running_loop()
        metrics = Metrics()
        observer = self._trace(metrics)
        self._front = front = FrontEnd(lambda command: self._engine.send(command), observer, self._config.tokenizer)
        self._health = Health(front)
        front.on_state = self._on_state
        front.on_idle = self._idle.set
        front.on_silence = self._engine_silent
        strangers = [BearerTokens(self._config.tokens)] if self._config.tokens else []
        interceptors = [*strangers, RefuseMalformed()]
        self._server = grpc.aio.server(interceptors=interceptors, options=limits.PUBLIC_SERVER_OPTIONS)
        calls = Calls(front)
        names = self._add_openai(calls) if self._config.openai else ()
        add_services(self._server, GenerationService(calls, metrics.summary), self._health, names)
        if not self._bind():
            return EXIT_PORT
        if self._config.metrics is not None:
            try:
                serve_metrics(metrics, *self._config.metrics)
            except OSError as error:
                return _complain(f"metrics port {self._config.metrics[1]}: {error.strerror}", EXIT_PORT)
        self._engine = self._make_engine(
            lambda notices: loop.call_soon_threadsafe(self._handle, notices),
            lambda code: loop.call_soon_threadsafe(self._engine_ended, code),
        )
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        await self._health.set()
        await self._server.start()
        self._tell_posture()
        logger.info("listening on %s, waiting for %d workers", self._config.listen, len(self._config.workers.addresses))
        await self._ending.wait()
        if not self._exit_code:
            await self._drain()
        await self._server.stop(LAST_WORDS_S)
        await loop.run_in_executor(None, self._engine.close)
        for close in self._closing:
            await loop.run_in_executor(None, close)
        return self._exit_code

    def _tell_posture(self) -> None:
        config = self._config
        host = config.listen.rpartition(":")[0]
        if host not in LOOPBACK_HOSTS and not config.tokens and config.tls.authority is None:
            logger.warning("%s is open to whoever can reach it; see --tokens-file and --tls-client-ca", config.listen)

    def _trace(self, metrics: Metrics) -> Observer:
        if self._config.traces is None:
            return metrics
        from scheduler_svc.tracing import Traces, otlp  # an optional extra

        traces = Traces(metrics, otlp(self._config.traces), self._config.trace_share)
        self._closing.append(traces.close)
        return traces

    def _add_openai(self, calls: Calls) -> Sequence[str]:
        from scheduler_svc.openai_front import add_openai_front  # an optional extra

        return add_openai_front(self._server, calls)

    def _bind(self) -> bool:
        credentials = self._config.tls.server_credentials()
        address = self._config.listen
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            _complain(
                f"port {address.rpartition(':')[2]} of {address.rpartition(':')[0]} cannot be bound; is it taken?", 0
            )
        return self.port != 0

    def _handle(self, notices: Sequence[Notice]) -> None:
        try:
            self._front.handle(notices)
        except Exception:
            logger.exception("handling the engine's news failed")
            self._end(EXIT_ENGINE)
        finally:
            self._engine.handled()

    def _on_state(self) -> None:
        front = self._front
        self._health.update()
        if front.state is EngineState.FAILED:
            _complain(front.reason, 0)
            self._end(EXIT_OPTIONS)
        elif front.shown_state is EngineState.SERVING:
            # One line when the service first serves: people and lockstep-up wait for it.
            if not self._announced:
                host = self._config.listen.rpartition(":")[0]
                print(f"{READY_MARK} on {host}:{self.port}", flush=True)
            self._announced = True
        elif front.reason and front.reason != self._told_reason:  # the same one comes with every try
            logger.info("%s: %s", front.shown_state.value, front.reason)
        self._told_reason = front.reason

    def _engine_ended(self, code: int) -> None:
        logger.error("the engine process ended with code %d", code)
        self._end(EXIT_ENGINE)
        self._front.engine_ended(f"the engine process ended with code {code}")

    def _engine_silent(self) -> None:
        logger.error("the engine process says nothing for %g s; it is killed", limits.ENGINE_SILENCE_S)
        self._engine.kill()
        self._engine_ended(-signal.SIGKILL)

    def _end(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code
        self._ending.set()

    def stop(self) -> None:
        """Drain and end; called again: end at once."""
        self._signals += 1
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._engine.kill()
            os._exit(EXIT_AT_ONCE)
        self._ending.set()

    async def _drain(self) -> None:
        """No new requests; running ones end by themselves or at the end of the drain time."""
        front = self._front
        self._idle.clear()
        front.drain()
        logger.info("draining: %d requests run, at most %g s", front.num_live, self._config.drain_timeout_s)
        for limit_s in (self._config.drain_timeout_s, LAST_WORDS_S):
            if front.num_live:
                try:
                    await asyncio.wait_for(self._idle.wait(), limit_s)
                except TimeoutError:
                    front.drain(now=True)


def _complain(message: str, code: int) -> int:
    print(f"lockstep-scheduler: {message}", file=sys.stderr, flush=True)
    return code


def main(arguments: Sequence[str] | None = None) -> None:
    config, options = configure(arguments)
    launch.name_process("lockstep-scheduler")
    launch.keep_large_buffers()
    level = getattr(logging, options.log_level.upper())
    logs.set_up("lockstep-scheduler", options.log_format, level)
    gc.freeze()  # what is loaded by now stays; collections need not look at it
    start = EngineStart(config.engine, config.workers.connect, level, options.log_format)
    raise SystemExit(run(config, start))


def run(config: SchedulerConfig, start: EngineStart) -> int:
    """Serve until a signal; the exit code."""
    import uvloop

    make_engine = functools.partial(EngineProcess, start)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(SchedulerServer(config, make_engine).run())
        except OSError as error:  # a certificate that cannot be read
            return _complain(str(error), EXIT_OPTIONS)


if __name__ == "__main__":
    main()
