"""The scheduler: anything that chooses, counts, remembers or refuses.

`from scheduler_svc import Engine` is the embedded engine; it is loaded on demand, since it brings torch.
"""

from typing import Any

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from scheduler_svc.embedded import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
