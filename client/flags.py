"""Flags that every command has: where the scheduler is and how the connection is secured.

Imports no gRPC until a connection is made, so that `--help` is quick.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from client.channel import Tls
    from client.retry import RetryPolicy

Server = Annotated[
    str, typer.Option("--server", envvar="LOCKSTEP_SERVER", metavar="HOST:PORT[,...]", help="Replicas by commas.")
]
Token = Annotated[str | None, typer.Option(envvar="LOCKSTEP_TOKEN", help="Bearer token.", show_envvar=True)]
TlsCa = Annotated[str | None, typer.Option(metavar="FILE", help="Root certificates; turns TLS on.")]
TlsCert = Annotated[str | None, typer.Option(metavar="FILE", help="Our certificate, for mutual TLS.")]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")]
Patience = Annotated[float, typer.Option(metavar="SECONDS", help="How long to try without any progress.")]

SERVER = "127.0.0.1:50051"
PATIENCE = 60.0


def tls_of(ca: str | None, cert: str | None, key: str | None) -> "Tls | None":
    """None without any of the files. A file that cannot be read ends the command with its name."""
    from client.channel import Tls

    if not (ca or cert or key):
        return None
    try:
        return Tls.from_files(ca, cert, key)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from None


def policy_of(patience: float) -> "RetryPolicy":
    """The default policy with this patience."""
    from client.retry import RetryPolicy

    return RetryPolicy(patience_s=patience)
