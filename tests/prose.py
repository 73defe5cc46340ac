"""Refuse prose that is hard to parse: `python -m tests.prose [files]`.

A comment or docstring must not open with a bare preposition or relative ("Of few rows ...",
"What another item costs"); a comment of Python must not open with "what", "those" or "which". IDIOMS are
refused anywhere in comments, docstrings, messages and pages; WORDS are refused there too, except in CUDA and
C++ sources, whose comments belong to the hash of the compiled kernels and are therefore not edited for a
word. Python is read with tokenize and ast, CUDA and C++ with a scanner of comments, Markdown by paragraph
without code. Consecutive comment lines are one comment, so that a continued sentence does not count as an
opening.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("backend", "converters", "docs", "kernels", "model_repo_templates", "tests", "tools")
#: examples of the idioms, and texts that are data
EXEMPT = ("tests/prose.py", "tests/test_prose.py", "converters/quantize/built_in_texts.py")
CXX = (".cu", ".cuh", ".h", ".cc", ".cpp")

OPENING = re.compile(
    r"(Of|As|To|By|With|On|In|At|From|For|Into|Until|Before|After|Behind|Beside|"
    r"Where|What|Whether|Why|Which|How|That|Those|Also|Else) [a-z]"
)
#: the same for comments of one line, which begin in lower case; Python only
FRAGMENT = re.compile(r"(what|those|which|whose) [a-z]")
IDIOMS = {
    re.compile(r"\bso (many|few|much) (?!(that|as)\b)[a-z]+", re.IGNORECASE): "say how many",
    re.compile(r"(?<!there )\b(is|are) no (?!(longer|more|less)\b|[a-z]+er than)[a-z0-9]+", re.IGNORECASE): (
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
_UNITS = "step|layer|second|hour|minute|day|token|row|model|door|line|weight|head|rank|prompt|client"
WORDS = {
    re.compile(r"\bin place of\b"): 'say "instead of"',
    re.compile(r"(?<!bench )\bbeside\b(?!:)", re.IGNORECASE): 'say "next to", "with" or "besides"',
    re.compile(
        rf"\b(ms|us|MiB|GiB|GB|MB|KiB|bytes|tokens|requests|messages|words|one) an? ({_UNITS})\b"
        r"(?! (is|are|was|that|which|may|can|must|has|have|keeps?)\b)"
    ): 'say "per"',
    re.compile(
        r"\b(four|three|two|us|one) an? (lane|chunk|response|thread|stream|column|block)\b"
    ): 'say "per"',
    re.compile(r"\banew\b"): 'say "again"',
    re.compile(r"\bagain and again\b"): 'say "repeatedly"',
    re.compile(r"\bby way of\b"): 'say "through"',
    re.compile(r"\bmended\b"): 'say "corrected" or "fixed"',
    re.compile(r"\b(hence|thereby|thereof|therein)\b", re.IGNORECASE): 'say "so" or "therefore"',
    re.compile(r"\bon (its|their) way\b"): 'say "in flight"',
    re.compile(r"\b(is|are|was|were) told apart\b"): 'say "distinguished"',
}

Comment = tuple[int, str]  # line of the opening, text with the markers removed
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_prose(source: str) -> Iterator[Comment]:
    """Yield comments (neighbouring full lines joined) and docstrings of Python source."""
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
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(text.split())


def python_messages(source: str) -> Iterator[Comment]:
    """Yield string literals of four words or more, such as errors and help, without docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and len(words := node.value.split()) > 3:
            yield node.lineno, " ".join(words)


def markdown_prose(source: str) -> Iterator[Comment]:
    """Yield paragraphs, list items and table rows of a page without fences and inline code."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.M | re.S)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if lines and (not line.strip() or re.match(r"\s*([-*|#]|\d+\.) ?", line)):
            yield start, re.sub(r"`[^`]*`|\]\([^)]*\)", "`", " ".join(lines))
            lines = []
        if line.strip():
            start, lines = (number, [line.strip()]) if not lines else (start, [*lines, line.strip()])


def cxx_prose(source: str) -> Iterator[Comment]:
    """Yield comments of C++ source; // comments on neighbouring lines are joined."""
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
    """Yield one line per finding in a Python, CUDA, C++ or Markdown file."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if path.suffix == ".md":
        yield from _idioms(name, markdown_prose(source), {**IDIOMS, **WORDS})
        return
    comments = list(cxx_prose(source) if path.suffix in CXX else python_prose(source))
    for line, text in comments:
        found = OPENING.match(text) or (path.suffix == ".py" and FRAGMENT.match(text))
        if found:
            yield f"{name}:{line}: opens with a bare {found[1]!r}: {text[:70]!r}"
    yield from _idioms(name, comments, IDIOMS if path.suffix in CXX else {**IDIOMS, **WORDS})
    if path.suffix == ".py" and Path("tests") not in Path(name).parents:
        yield from _idioms(name, python_messages(source), {**IDIOMS, **WORDS})


def _idioms(name: Path, prose: Iterable[Comment], idioms: dict[re.Pattern[str], str]) -> Iterator[str]:
    for line, text in prose:
        for idiom, advice in idioms.items():
            if found := idiom.search(text):
                yield f"{name}:{line}: {found[0]!r}, {advice}: {text[:70]!r}"


def sources() -> Iterator[Path]:
    """Yield the files that are checked: FOLDERS without EXEMPT."""
    exempt = {ROOT / name for name in EXEMPT}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", *CXX) and path not in exempt:
                yield path


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or list(sources())
    found = [line for path in paths for line in findings(path)]
    print("\n".join(found) if found else f"prose of {len(paths)} files: nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
