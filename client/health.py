"""grpc.health.v1 of any server: scheduler or worker."""

import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.channel import Tls, open_sync
from client.errors import failure_of_call


def state_of(address: str, tls: Tls | None = None, service: str = "", wait_s: float = 0.0) -> str:
    """SERVING, NOT_SERVING, or why there is no answer; waits up to `wait_s` for SERVING."""
    deadline = time.monotonic() + wait_s
    with open_sync(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
                state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            except grpc.RpcError as error:
                failure = failure_of_call(error)
                state = f"{failure.code}: {failure.message}"
            if state == "SERVING" or time.monotonic() >= deadline:
                return state
            time.sleep(0.2)
