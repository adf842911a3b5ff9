"""The composition root of a worker: the service around an engine, in the order of starting that app.py states.

What can be refused from headers alone is refused before the port is bound. Loading happens behind a bound port whose
health says NOT_SERVING, so that a scheduler can tell a slow worker from a missing one. Strangers are refused: beyond
loopback a worker starts only with a secret or with mutual TLS.
"""

import hmac
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import codec, worker_pb2_grpc
from protos import worker_pb2 as pb
from protos.worker_link import SECRET_KEY, SECRET_VARIABLE
from worker_svc.assembly import Refused, check, load_executor, open_rendezvous
from worker_svc.config import WorkerConfig
from worker_svc.malformed import RefuseMalformed
from worker_svc.service import WorkerService

logger = logging.getLogger(__name__)

SERVICE_NAME = "lockstep.v1.Worker"
MAX_CALLS = 32  # at once; a scheduler needs a stream and what it asks beside it
EXIT_REFUSED, EXIT_PORT_TAKEN, EXIT_DEVICE = 2, 3, 4
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where and to whom. The TLS files come all three or not at all: certificate, key, and the CA of callers."""

    listen: str
    advertise: str
    secret: str | None = None
    tls: tuple[Path, Path, Path] | None = None


def serve(config: WorkerConfig, where: ServeConfig) -> None:
    """Serve until the process is told to end (SystemExit, raised in this thread by a signal)."""
    try:
        check(config)
        _check_open_to_strangers(where)
    except Refused as refusal:
        _exit(EXIT_REFUSED, str(refusal))
    loading = pb.Description(
        state=pb.Description.State.LOADING, rank=config.rank, tp=config.tp, model_path=str(config.model)
    )
    service = WorkerService(
        config.rank,
        config.tp,
        loading,
        lambda group, store: open_rendezvous(config, where.advertise, group, store),
        on_broken=_end_for_another,
    )
    status = health.HealthServicer()
    _set_health(status, serving=False)
    server = grpc.server(
        ThreadPoolExecutor(MAX_CALLS, "call"),
        interceptors=[*([_RefuseStrangers(where.secret)] if where.secret is not None else []), RefuseMalformed()],
        options=codec.WORKER_CHANNEL_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    address = _bind(server, where)
    server.start()
    print(f"lockstep-worker: rank {config.rank} of {config.tp} listening on {address}", flush=True)
    try:
        service.ready(load_executor(config))
        _set_health(status, serving=True)
        logger.info("ready: %s", config.model)
        threading.Event().wait()
    except Refused as refusal:
        _exit(EXIT_REFUSED, str(refusal))
    finally:
        _set_health(status, serving=False)
        service.close()
        server.stop(grace=0.5).wait()


class _RefuseStrangers(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Every call but those of the health service carries the secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

        def refuse(_request: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this worker serves only those who know its secret")

        # one handler for all kinds of call: a call is refused before its first message matters
        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if details.method.startswith("/grpc.health.v1."):
            return continuation(details)
        shown = next((value for key, value in details.invocation_metadata if key == SECRET_KEY), "")
        known = shown.encode() if isinstance(shown, str) else shown
        return continuation(details) if hmac.compare_digest(known, self._secret) else self._refusal


def _check_open_to_strangers(where: ServeConfig) -> None:
    host = where.listen.rpartition(":")[0]
    if host not in LOOPBACK_HOSTS and where.secret is None and where.tls is None:
        raise Refused(
            f"--listen {where.listen} is reachable from other hosts: set {SECRET_VARIABLE} (the same for the "
            "scheduler and all workers) or give --tls-cert, --tls-key and --tls-ca"
        )


def _bind(server: grpc.Server, where: ServeConfig) -> str:
    try:
        if where.tls is None:
            port = server.add_insecure_port(where.listen)
        else:
            certificate, key, authority = (path.read_bytes() for path in where.tls)
            credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
            port = server.add_secure_port(where.listen, credentials)
    except RuntimeError as error:
        _exit(EXIT_PORT_TAKEN, f"cannot listen on {where.listen}: {error}")
    return f"{where.listen.rpartition(':')[0]}:{port}"


def _set_health(status: health.HealthServicer, *, serving: bool) -> None:
    kinds = health_pb2.HealthCheckResponse.ServingStatus
    for name in ("", SERVICE_NAME):
        status.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)


def _end_for_another(reason: str) -> None:
    """A device whose context is broken takes no other group in this process: whoever supervises starts a new one."""
    logger.error("the device is lost to this process, which ends: %s", reason)
    os._exit(EXIT_DEVICE)


def _exit(code: int, message: str) -> Any:
    print(f"lockstep-worker: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)
