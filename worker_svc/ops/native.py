"""Machine code from LLVM's text, for the processor at hand.

Knows llvmlite, which numba brings. Does not know what the code does. Invariant: the text is translated as it stands
(no fast math, nothing contracted or reordered), so what it computes is the same on every processor.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Addresses of the functions of one text. They stand as long as the process does."""

    addresses: dict[str, int]

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """To be called from Python; without the interpreter's lock."""
        return ctypes.CFUNCTYPE(None, *arguments)(self.addresses[name])


def _target() -> Any:
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def assemble(text: str, names: Iterable[str], imports: Iterable[str] = ()) -> NativeCode:
    """Translate the text. `imports`: functions of the C library that it calls. Raises RuntimeError."""
    libc = ctypes.CDLL(None)
    for name in imports:
        llvm.add_symbol(name, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value)
    module = llvm.parse_assembly(text)
    module.verify()
    # As an object first: an engine that is given a module translates it for the plainest processor.
    code = _target().emit_object(module)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in names}
    engine.detach()  # never freed: a helper may sleep in the code while the interpreter ends
    return NativeCode(addresses)


def has_feature(name: str) -> bool:
    """Whether the processor has a feature, by LLVM's name."""
    return bool(llvm.get_host_cpu_features().get(name, False))
