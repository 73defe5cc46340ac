"""Refuse comments and docstrings that are hard to parse: `python -m tests.prose [files]`.

A comment or docstring must not open with a bare preposition or relative ("Of few rows ...",
"What another item costs"), and a few idioms are refused anywhere in it. Python is read with
tokenize and ast, CUDA and C++ with a scanner of comments. Consecutive comment lines are one
comment, so that a line which only continues a sentence is not taken for an opening.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("backend", "converters", "kernels", "model_repo_templates", "tools")
CXX = (".cu", ".cuh", ".h", ".cc", ".cpp")

OPENING = re.compile(
    r"(Of|As|To|By|With|On|In|At|From|For|Into|Until|Before|After|Behind|Beside|"
    r"Where|What|Whether|Why|Which|How|That|Those|Also|Else) [a-z]"
)
IDIOMS = {
    re.compile(r"\bso (many|few|much) (?!(that|as)\b)[a-z]+", re.IGNORECASE): "say how many",
    re.compile(r"(?<!there )\b(is|are) no (?!(longer|more|less)\b)[a-z0-9]+", re.IGNORECASE): (
        'say "is not a ..."'
    ),
    re.compile(r"\bsave (for|that|when|where|of)\b"): 'say "except"',
    re.compile(r"\bask(s|ed)? for\b"): "say requested, issued or loaded",
    re.compile(r"\b(goes|go|went) on (?!to\b)|\bgoes on\."): "say continue",
    re.compile(r"\bfor ever\b"): 'say "forever" or "indefinitely"',
    re.compile(r"\b(is|are|was|were|be|been) told\b"): "say reported, called or known",
    re.compile(r"\breads? (it|them) not\b"): "say ignored",
    re.compile(r"\bwhoever\b", re.IGNORECASE): "name who or what it is",
    re.compile(r"\bof which\b"): "make it two sentences",
}

Comment = tuple[int, str]  # line of the opening, text with the markers removed


def python_prose(source: str) -> Iterator[Comment]:
    """Comments (neighbouring full lines joined) and docstrings of Python source."""
    block: list[str] = []
    first = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, at = token.start
        text = token.string.lstrip("#:").strip()
        alone = not token.line[:at].strip()
        if block and alone and line == last + 1 and at == column:
            block.append(text)
        else:
            if block:
                yield first, " ".join(block)
            block, first, column = [text], line, at
        last = line
    if block:
        yield first, " ".join(block)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(text.split())


def cxx_prose(source: str) -> Iterator[Comment]:
    """Comments of C++ source; // comments on neighbouring lines are joined."""
    token = re.compile(
        r'//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
        re.DOTALL,
    )
    joined: list[str] = []
    first = last = 0
    for match in token.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if match["block"] is not None:
            yield line, " ".join(re.sub(r"^\s*\*", "", match["block"], flags=re.M).split())
        if match["line"] is None:
            continue
        text = match["line"].lstrip("/!<").strip()
        alone = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if joined and alone and line == last + 1:
            joined.append(text)
        else:
            if joined:
                yield first, " ".join(joined)
            joined, first = [text], line
        last = line
    if joined:
        yield first, " ".join(joined)


def findings(path: Path) -> Iterator[str]:
    source = path.read_text()
    prose = cxx_prose(source) if path.suffix in CXX else python_prose(source)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, text in prose:
        if found := OPENING.match(text):
            yield f"{name}:{line}: opens with a bare {found[1]!r}: {text[:70]!r}"
        for idiom, advice in IDIOMS.items():
            if found := idiom.search(text):
                yield f"{name}:{line}: {found[0]!r}, {advice}: {text[:70]!r}"


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", *CXX):
                yield path


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or list(sources())
    found = [line for path in paths for line in findings(path)]
    print("\n".join(found) if found else f"prose of {len(paths)} files: nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
