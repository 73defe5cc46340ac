"""The table of docs/guides/clients.md between its two markers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- make clients: begin -->", "<!-- make clients: end -->"
REPLAYED = ", its request replayed"  # appended if the program is not installed
HEADER = ("program", "version", "how", "model or route", "verdict")


@dataclass(frozen=True)
class Row:
    program: str
    version: str
    how: str
    model: str
    verdict: str

    @property
    def use(self) -> tuple[str, str]:
        """Return the key of a row, equal in all runs: the program and how it was used."""
        return self.program, self.how.removesuffix(REPLAYED)


def markdown(rows: list[Row], when: str) -> str:
    """The text that belongs between the markers. when: the line above the table."""
    cells = [HEADER, tuple("---" for _ in HEADER)]
    cells += [(row.program, row.version, row.how, f"`{row.model}`", row.verdict) for row in rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
    return "\n".join(["", when, "", *lines, ""])


def replace(text: str, content: str) -> str:
    """`text` with `content` between its markers. Raises ValueError where they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"wanted {BEGIN} and {END} once each, in this order")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def write(path: Path, rows: list[Row], when: str) -> None:
    path.write_text(replace(path.read_text(encoding="utf-8"), markdown(rows, when)), encoding="utf-8")


def merged(held: list[Row], new: list[Row], order: list[tuple[str, str]]) -> list[Row]:
    """Return `held` with its rows replaced by those of `new` with the same use. order: all possible uses."""
    by_use = {row.use: row for row in [*held, *new]}
    return [by_use[use] for use in order if use in by_use]


def read(path: Path) -> list[Row]:
    """The rows that the file holds now."""
    text = path.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [Row(one[0], one[1], one[2], one[3].strip("`"), one[4]) for one in cells]
