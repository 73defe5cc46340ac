"""Reads CUDA sources for the tests of rules that no compiler checks: functions, calls and launches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from tridecode.kernels.build import SOURCES


@dataclass(frozen=True)
class Function:
    name: str
    body: str
    is_kernel: bool


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


@cache
def unit(path: Path) -> str:
    """Return the code of a .cu file behind that of all headers of csrc that it includes, without comments."""
    seen: list[Path] = []

    def read(file: Path) -> str:
        if file in seen:
            return ""
        seen.append(file)
        text = without_comments(file.read_text())
        included = re.findall(r'#include "([\w/]+\.cuh)"', text)
        return "".join(read(SOURCES / name) for name in included) + text

    return read(path)


@lru_cache(maxsize=256)
def functions(code: str) -> tuple[Function, ...]:
    """Return each function that C++ code without comments defines as __global__ or __device__."""
    found = []
    for match in re.finditer(r"__(global|device)__", code):
        head = re.match(r"[^;{]*\{", code[match.start() :])
        if head is None:  # a declaration
            continue
        plain = re.sub(r"__\w+__\s*(\((?:[^()]|\([^()]*\))*\))?", "", head.group())
        name = re.search(r"(\w+(?:\(\))?)\s*\(", plain)
        if name is None:
            continue
        start = match.start() + head.end()
        found.append(Function(name.group(1), code[start : end_of(code, start)], match.group(1) == "global"))
    return tuple(found)


def end_of(code: str, start: int, pair: str = "{}") -> int:
    """Return the place behind the brace that closes the one before `start`."""
    depth, at = 1, start
    while depth:
        depth += {pair[0]: 1, pair[1]: -1}.get(code[at], 0)
        at += 1
    return at


def callers(defined: tuple[Function, ...], called: set[str]) -> set[str]:
    """Return the names of the functions that call one of `called`, directly or not, and `called`."""
    calls: dict[str, set[str]] = {function.name: set() for function in defined}
    for function in defined:
        calls[function.name] |= set(re.findall(r"(\w+)\s*(?:<[^;{}()]*>)?\(", function.body))
    reached = set(called)
    while new := {name for name, names in calls.items() if names & reached} - reached:
        reached |= new
    return reached


@dataclass(frozen=True)
class Launch:
    """A call of launch, launch_resident or launch_in_clusters. names: that the launch may have."""

    how: str
    names: frozenset[str]
    kernels: frozenset[str]


def launches(code: str) -> list[Launch]:
    """Return the launches of a unit. One whose kernel is a variable gets those that no other one names."""
    kernels = {function.name for function in functions(code) if function.is_kernel}
    found: list[Launch] = []
    for match in re.finditer(r"\b(launch(?:_resident|_in_clusters)?)\(", code):
        text = code[match.end() : end_of(code, match.end(), "()")]
        first = text.split(",")[0].strip()
        if "," not in text or first == "what" or first.startswith("const char"):  # launch's own definitions
            continue
        named = kernels & set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", text)))
        found.append(Launch(match.group(1), _strings(first, code), frozenset(named)))
    rest = frozenset(kernels - {name for launch in found for name in launch.kernels})
    return [Launch(each.how, each.names, each.kernels or rest) for each in found]


def _strings(expression: str, code: str) -> frozenset[str]:
    """Return the strings that the first argument of a launch may be."""
    if literal := re.fullmatch(r'"(\w+)"', expression):
        return frozenset((literal.group(1),))
    if call := re.match(r"(\w+)\(", expression):
        body = re.search(rf"\b{call.group(1)}\([^)]*\) \{{([^}}]*)\}}", code)
        return frozenset(re.findall(r'"([\w ]+)"', body.group(1))) if body else frozenset()
    return frozenset(re.findall(rf'\b{expression} = "(\w+)"', code))
