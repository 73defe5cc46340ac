"""Tables of the reliability tests, for a terminal and for docs/lab/soak.md."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal."""
    texts = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in [heads, *rows]]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(texts[0]), rule, *map(line, texts[1:])])


def megabytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
