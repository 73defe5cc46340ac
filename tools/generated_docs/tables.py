"""Replaces tables in pages of docs/, between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with new tables. Raises KeyError for a marker with an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_or_compare(pages: Mapping[Path, Mapping[str, str]], write: bool, command: str) -> int:
    """Write or check the pages. Returns exit code 1 if a table is out of date and `write` is false.

    pages: the tables of each page.
    """
    code = 0
    for path, tables in pages.items():
        page = path.read_text(encoding="utf-8")
        new = updated(page, tables)
        if write:
            path.write_text(new, encoding="utf-8")
        elif new != page:
            print(f"{path} has tables that are out of date; run {command} --write", file=sys.stderr)
            code = 1
    return code
