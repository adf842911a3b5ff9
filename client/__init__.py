"""The client: a library, a command and a load test.

`from client import Lockstep, AsyncLockstep`; the names are loaded on first use, so that `lockstep --help`
needs no gRPC.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.generate import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Submodules are asked for here too, before Python looks for a file; those must not load gRPC.
    if name[0].isupper() or name == "build":
        library = importlib.import_module("client.generate")
        if name in library.__all__:
            return getattr(library, name)
    raise AttributeError(f"module 'client' has no attribute {name!r}")
