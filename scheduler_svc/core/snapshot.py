"""The whole state of a core as text, and a core put into that state: where a part of a decision log begins.

A snapshot is a pickle whose reading is confined: it makes objects of the core's own classes, arrays and plain
containers, and nothing else that a file could name. It fits the version of the core that wrote it.
"""

import base64
import io
import pickle
import zlib
from types import MethodType
from typing import Any

from scheduler_svc.core.scheduler import Scheduler

OURS = ("scheduler_svc.core.", "protos.step")
OTHERS = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}
CORE = "core"  # stands for the core itself, wherever a part refers to it


def take(core: Scheduler, without: frozenset[str]) -> str:
    """The attributes of the core but for those named."""
    data = io.BytesIO()
    _Pickler(core, data).dump({name: value for name, value in vars(core).items() if name not in without})
    return base64.b64encode(zlib.compress(data.getvalue(), 1)).decode()


def restore(core: Scheduler, text: str) -> None:
    """Put the core into the state. Raises ValueError for what is no snapshot of this version of the core."""
    try:
        state = _Unpickler(core, io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
        vars(core).update(state)
    except (pickle.UnpicklingError, zlib.error, AttributeError, ImportError, TypeError) as error:
        raise ValueError(f"no snapshot of this version of the core: {error}") from None


class _Pickler(pickle.Pickler):
    def __init__(self, core: Scheduler, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self._core = core

    def persistent_id(self, obj: Any) -> str | None:
        return CORE if obj is self._core else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MethodType):
            return _bound, (obj.__self__, obj.__func__.__name__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, core: Scheduler, file: io.BytesIO) -> None:
        super().__init__(file)
        self._core = core

    def persistent_load(self, name: Any) -> Scheduler:
        return self._core

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith(OURS) or (module, name) in OTHERS else None
        if found is _bound or isinstance(found, type) or (module, name) in OTHERS:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a snapshot")


def _bound(part: Any, name: str) -> Any:
    """A method of a part of the core, as another part was given it."""
    if not type(part).__module__.startswith(OURS):
        raise pickle.UnpicklingError(f"{type(part).__name__} is no part of a core")
    return getattr(part, name)
