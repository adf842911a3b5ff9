"""Channels to schedulers: options, credentials, which address is used now.

Knows addresses and how a connection is secured. Does not retry: it only moves on to the next address when told that
one failed. Channels are made on first use and never before a fork (load-test processes are spawned).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

# gRPC's own back-off between connection attempts grows to two minutes, which a client that retries would sit out.
# A dead peer is noticed after keepalive_time + keepalive_timeout; the server allows pings every 10 s.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),  # the server's limit decides, and says so
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. `ca` absent: the system's roots; `cert` and `key`: mutual TLS. `server_name` overrides the check."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None

    @staticmethod
    def from_files(ca: str | None, cert: str | None, key: str | None, server_name: str | None = None) -> "Tls":
        """Reads the files that are named."""
        roots, chain, private = (Path(name).read_bytes() if name else None for name in (ca, cert, key))
        return Tls(roots, chain, private, server_name)

    def credentials(self) -> grpc.ChannelCredentials:
        """In gRPC's form."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


AnyChannel = TypeVar("AnyChannel")
Metadata = tuple[tuple[str, str], ...]


class Channels(Generic[AnyChannel]):
    """One channel an address; `current` is the one in use."""

    def __init__(
        self, addresses: str | Sequence[str], open_channel: Callable[[str, Tls | None], AnyChannel], tls: Tls | None
    ) -> None:
        names = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = tuple(name.strip() for name in names if name.strip()) or (DEFAULT_ADDRESS,)
        self._open = open_channel
        self._tls = tls
        self._channels: dict[str, AnyChannel] = {}
        self._at = 0

    @property
    def address(self) -> str:
        return self.addresses[self._at]

    def current(self) -> AnyChannel:
        """The channel in use, made if need be."""
        if self.address not in self._channels:
            self._channels[self.address] = self._open(self.address, self._tls)
        return self._channels[self.address]

    def failed(self, address: str) -> None:
        """Use the next address from now on, unless somebody has moved on already."""
        if address == self.address:
            self._at = (self._at + 1) % len(self.addresses)

    def opened(self) -> list[AnyChannel]:
        """Everything to close."""
        return list(self._channels.values())


def channel_options(tls: Tls | None) -> list[tuple[str, int | str]]:
    """OPTIONS and the name to check the certificate against."""
    named: list[tuple[str, int | str]] = list(OPTIONS)
    if tls is not None and tls.server_name:
        named.append(("grpc.ssl_target_name_override", tls.server_name))
    return named


def open_sync(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel for the blocking client."""
    options = channel_options(tls)
    return grpc.secure_channel(address, tls.credentials(), options) if tls else grpc.insecure_channel(address, options)


def open_async(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel for the asyncio client."""
    options = channel_options(tls)
    if tls:
        return grpc.aio.secure_channel(address, tls.credentials(), options)
    return grpc.aio.insecure_channel(address, options)


def call_metadata(token: str | None) -> Metadata:
    """What every call carries."""
    return (("authorization", f"Bearer {token}"),) if token else ()
