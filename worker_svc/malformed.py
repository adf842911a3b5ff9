"""Answers bytes that are no message with INVALID_ARGUMENT, on every method of a threaded server, no traceback."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from protos.malformed import Malformed, checked, tolerant

Handler = Callable[..., Any]


class RefuseMalformed(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Behind the interceptors that decide who may call."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        found: Any = continuation(details)
        if found is None or found.request_deserializer is None:
            return found  # type: ignore[no-any-return]
        kind = (
            ("stream" if found.request_streaming else "unary")
            + "_"
            + ("stream" if found.response_streaming else "unary")
        )
        handler = getattr(found, kind)
        if not found.request_streaming:
            wrapped = _of_one(handler)
        else:
            wrapped = _of_many_to_many(handler) if found.response_streaming else _of_many_to_one(handler)
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, tolerant(found.request_deserializer), found.response_serializer)  # type: ignore[no-any-return]


def _of_one(handler: Handler) -> Handler:
    @functools.wraps(handler)  # with the attributes by which gRPC knows a handler that does not block
    def answer(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
        if isinstance(request, Malformed):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return handler(request, context, *more)

    return answer


def _of_many_to_one(handler: Handler) -> Handler:
    @functools.wraps(handler)
    def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        try:
            return handler(map(checked, requests), context)
        except Malformed as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answer


def _of_many_to_many(handler: Handler) -> Handler:
    @functools.wraps(handler)
    def answers(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from handler(map(checked, requests), context)
        except Malformed as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answers
