"""Answers bytes that are no message with INVALID_ARGUMENT, on every method of an asyncio server, without a traceback.

A stream that has such bytes in its middle ends so; its handler is left by the exception like by any other, and frees
what it holds.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from protos.malformed import Malformed, checked, tolerant

Handler = Callable[[Any, Any], Any]


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Behind the interceptors that decide who may call."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        found = await continuation(details)
        if found is None or found.request_deserializer is None:
            return found
        kind = (
            ("stream" if found.request_streaming else "unary")
            + "_"
            + ("stream" if found.response_streaming else "unary")
        )
        wrapped = _guard(getattr(found, kind), found.request_streaming)
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, tolerant(found.request_deserializer), found.response_serializer)


def _guard(handler: Handler, streams_in: bool) -> Handler:
    """The handler with checked messages, a coroutine or a generator as before: gRPC calls the two differently."""

    def given(request: Any) -> Any:
        return _each(request) if streams_in else checked(request)

    @functools.wraps(handler)
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await handler(given(request), context)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    @functools.wraps(handler)
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for message in handler(given(request), context):
                yield message
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answers if inspect.isasyncgenfunction(handler) else answer


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield checked(request)
