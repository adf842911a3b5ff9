"""The span in which a request is made, as metadata: the server's spans of the request hang under it.

Nothing is imported for it. Only an application that uses OpenTelemetry can have an active span, and such a one has
loaded the package by then.
"""

import sys

from client.channel import Metadata


def trace_metadata() -> Metadata:
    """W3C trace context of the active span; empty where there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
