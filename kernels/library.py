"""The compiled kernels as Python functions: csrc/api/*.h declare tasks and functions for both languages.

The library is bound with ctypes.PyDLL, which keeps the interpreter lock: a launch takes microseconds, and
releasing the lock costs ten times more when another thread is busy.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tridecode.kernels.build import DEBUG_LIBRARY, LIBRARY, api_header, source_hash

_NUMBERS = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_RESULTS = {**_NUMBERS, "const char*": ctypes.c_char_p}
_SCALARS = (*_NUMBERS.values(), ctypes.c_void_p)


class KernelError(RuntimeError):
    """The library is missing or stale, or a launch failed; the text is the library's own."""


class Library:
    """Every function of csrc/api without its prefix, e.g. `library.norm(...)`.

    A function whose first parameter is a task takes the stream and the task's fields, by name or in one dict,
    e.g. `library.gemv(stream, out=..., x=...)`; omitted fields are 0. A nonzero status raises KernelError, an
    unknown field AttributeError. path: None for library_path().
    """

    def __init__(self, path: Path | None = None):
        path = path or library_path()
        debug = " --debug" if path == DEBUG_LIBRARY else ""
        rebuild = f"build it with: python -m tridecode.kernels.build{debug}"
        if not path.exists():
            raise KernelError(f"{path} does not exist; {rebuild}")
        self._dll = ctypes.PyDLL(str(path))
        header = api_header()
        #: the structs of the ABI by name, e.g. to make arrays
        self.structures = structures(header)
        #: codes of tridecode_operand by name: "dense", "int8", "fp8", "two_parts", ...
        self.operands = operands(header)
        self._text = self._function("tridecode_error", ctypes.c_char_p, [])
        for result, name, types in prototypes(header):
            raw = self._function(name, result, types)
            returns_status = result is ctypes.c_int and name != "tridecode_abi_version"
            if types and types[0] not in _SCALARS:
                raw = self._launcher(raw, types[0]._type_)
            elif returns_status:
                raw = self._checked(raw)
            setattr(self, name[len("tridecode_") :], raw)
        wanted = int(re.search(r"#define TRIDECODE_ABI_VERSION (\d+)", header).group(1))  # type: ignore[union-attr]
        found = self.abi_version()
        if found != wanted:
            raise KernelError(f"{path} has binary interface {found}; csrc/api wants {wanted}; {rebuild}")
        if source_hash() not in self.info:
            raise KernelError(f"{path} was built from other sources ({self.info}); {rebuild}")

    def __getattr__(self, name: str) -> Any:  # attributes added by setattr above; for type checkers
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

    def _launcher(self, raw: Callable[..., int], task: type[ctypes.Structure]) -> Callable[..., None]:
        def launch(stream: int, given: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
            made = task(**fields) if given is None else task(**given)
            if raw(ctypes.byref(made), stream):
                raise KernelError(self._text().decode())

        return launch

    @property
    def info(self) -> str:
        """Architectures, compiler and source hash of the build."""
        return self.build_info().decode()


def library_path() -> Path:
    """Return the library that TRIDECODE_KERNELS names: "release" (default) or "debug". Raises KernelError."""
    name = os.environ.get("TRIDECODE_KERNELS", "release")
    paths = {"release": LIBRARY, "debug": DEBUG_LIBRARY}
    if name not in paths:
        raise KernelError(f"TRIDECODE_KERNELS is {name!r}; wanted release or debug")
    return paths[name]


def structures(header: str) -> dict[str, type[ctypes.Structure]]:
    """Return each `typedef struct {...} name;` of a C header; ctypes lays out numbers, pointers and arrays as
    C does.
    """
    found: dict[str, type[ctypes.Structure]] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", _code(header), re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            first, *others = (part.strip() for part in declaration.split(","))
            fields += [_field(field.split()[-1], _type(first)) for field in (first, *others)]
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    return found


def _field(declared: str, kind: Any) -> tuple[str, Any]:
    """Return name and type of a field declared as `name` or `name[count]`."""
    name, _, count = declared.partition("[")
    return name, kind * int(count.rstrip("]")) if count else kind


def operands(header: str) -> dict[str, int]:
    """Map the names of tridecode_operand's enumerators to their codes: kOperandFp8Blocks = 5 is
    {"fp8_blocks": 5}.
    """
    (body,) = re.findall(r"enum tridecode_operand \{(.*?)\};", _code(header), re.DOTALL)
    found = re.findall(r"kOperand(\w+)\s*=\s*(\d+)", body)
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): int(code) for name, code in found}


def prototypes(header: str) -> list[tuple[Any, str, list[Any]]]:
    """Yield (result type, name, argument types) of each function that a C header declares."""
    tasks, found = structures(header), []
    for result, name, arguments in re.findall(
        r"^([\w ]+\*?)\s*\b(tridecode_\w+)\(([^)]*)\);", _code(header), re.MULTILINE
    ):
        names = [] if arguments.strip() == "void" else [part.strip() for part in arguments.split(",")]
        found.append((_RESULTS[result.strip()], name, [_type(part, tasks) for part in names]))
    return found


def _code(header: str) -> str:
    return re.sub(r"//[^\n]*", "", header)


def _type(declaration: str, tasks: dict[str, type[ctypes.Structure]] | None = None) -> Any:
    """Of `int64_t x_stride`, or of a pointer: c_void_p, or POINTER(task) to one of the tasks."""
    words = declaration.replace("*", " * ").split()
    if "*" not in words:
        return _NUMBERS[words[-2]]
    task = (tasks or {}).get(words[-3])
    return ctypes.c_void_p if task is None else ctypes.POINTER(task)


def current_stream(device: torch.device) -> int:
    """Return the stream to launch on, read at each launch: a stored stream would escape a graph's capture."""
    return torch._C._cuda_getCurrentRawStream(device.index)
