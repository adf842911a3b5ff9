"""Who may call: TLS and mutual TLS, bearer tokens on the public service, the secret towards the workers.

Health checks are open to everyone, since what asks for them has no token. Tokens are compared in constant time and
never logged.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

OPEN_METHODS = ("/grpc.health.v1.Health/",)
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `authority` the other side must show a certificate of it (mutual TLS)."""

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext. Raises OSError for a file that cannot be read."""
        if self.certificate is None or self.key is None:
            return None
        authority = self.authority.read_bytes() if self.authority is not None else None
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext. Without an authority the system's are trusted."""
        if self.authority is None and self.certificate is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority.read_bytes() if self.authority is not None else None,
            private_key=self.key.read_bytes() if self.key is not None else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate is not None else None,
        )


def read_tokens(path: Path) -> tuple[str, ...]:
    """One token a line; empty lines and lines with # are skipped. Raises ValueError when none is left."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"{path} holds no token")
    return tokens


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without `authorization: Bearer TOKEN`, for any of the tokens."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

        async def refuse(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(OPEN_METHODS) or self._admits(details.invocation_metadata):
            return await continuation(details)
        return self._refusal

    def _admits(self, metadata: Any) -> bool:
        for name, value in metadata or ():
            scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
            if name == "authorization" and scheme.lower() == "bearer":
                digest = hashlib.sha256(token.strip().encode()).digest()
                return any([hmac.compare_digest(digest, known) for known in self._digests])
        return False
