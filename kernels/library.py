"""The compiled kernels as Python functions: argument types come from csrc/api.h, the one declaration.

Bound with ctypes.PyDLL: a launch takes microseconds, and giving up the interpreter lock for it costs ten
times more
when another thread is busy.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Callable

import torch

from tridecode.kernels.build import LIBRARY, SOURCES, source_hash

_TYPES = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "const char*": ctypes.c_char_p,
}


class KernelError(RuntimeError):
    """The library is missing or stale, or a launch failed; the text is the library's own."""


class Library:
    """Every function of api.h without its prefix, e.g. `library.norm(...)`; a status that is not 0 raises
    KernelError."""

    def __init__(self, path: Path = LIBRARY):
        rebuild = "build it with: python -m tridecode.kernels.build"
        if not path.exists():
            raise KernelError(f"{path} does not exist; {rebuild}")
        self._dll = ctypes.PyDLL(str(path))
        header = (SOURCES / "api.h").read_text()
        self._text = self._function("tridecode_error", ctypes.c_char_p, [])
        for result, name, types in prototypes(header):
            raw = self._function(name, result, types)
            returns_status = result is ctypes.c_int and name != "tridecode_abi_version"
            setattr(self, name[len("tridecode_") :], self._checked(raw) if returns_status else raw)
        wanted = int(re.search(r"#define TRIDECODE_ABI_VERSION (\d+)", header).group(1))  # type: ignore[union-attr]
        found = self.abi_version()
        if found != wanted:
            raise KernelError(f"{path} has binary interface {found}; api.h wants {wanted}; {rebuild}")
        if source_hash() not in self.info:
            raise KernelError(f"{path} was built from other sources ({self.info}); {rebuild}")

    def __getattr__(self, name: str) -> Any:  # what setattr above has added; for type checkers
        raise AttributeError(name)

    def _function(self, name: str, result: Any, types: list[Any]) -> Callable[..., Any]:
        function = getattr(self._dll, name)
        function.restype, function.argtypes = result, types
        return function

    def _checked(self, raw: Callable[..., int]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if raw(*arguments):
                raise KernelError(self._text().decode())

        return call

    @property
    def info(self) -> str:
        """Architectures, compiler and source hash of the build."""
        return self.build_info().decode()


def prototypes(header: str) -> list[tuple[Any, str, list[Any]]]:
    """(result type, name, argument types) of each function that a C header declares."""
    code = re.sub(r"//[^\n]*", "", header)
    found = []
    for result, name, arguments in re.findall(
        r"^([\w ]+\*?)\s*\b(tridecode_\w+)\(([^)]*)\);", code, re.MULTILINE
    ):
        names = [] if arguments.strip() == "void" else [part.strip() for part in arguments.split(",")]
        found.append((_TYPES[result.strip()], name, [_argument_type(part) for part in names]))
    return found


def _argument_type(declaration: str) -> Any:
    if "*" in declaration:
        return ctypes.c_void_p
    return _TYPES[declaration.split()[-2]]


def current_stream(device: torch.device) -> int:
    """The stream to launch on, read at each launch: a stream kept from before would escape a graph's
    capture."""
    return torch._C._cuda_getCurrentRawStream(device.index)
