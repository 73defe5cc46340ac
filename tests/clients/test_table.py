"""The table of `make clients`; docs/guides/clients.md has a row for every use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import table
from tests.clients.environments import ENVIRONMENTS
from tests.clients.programs import PROGRAMS
from tests.clients.replay import recorded, request_of
from tests.clients.table import BEGIN, END, Row

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
ROWS = [
    Row("curl", "8.0", "`/generate`", "tensorrt_llm_bls", "works"),
    Row("a client", "", "`a | b`, its request replayed", "ensemble", "does not: beams"),
]


def test_rows_survive_the_file_and_nothing_else_changes(tmp_path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# A page\n\n{BEGIN}\nold\n{END}\n\nmore\n")
    table.write(file, ROWS[:1], "today")
    table.write(file, ROWS[:1], "today")
    text = file.read_text()
    assert text.startswith(f"# A page\n\n{BEGIN}\n\ntoday\n") and text.endswith(f"{END}\n\nmore\n")
    assert table.read(file) == ROWS[:1]


@pytest.mark.parametrize("text", ["no marker", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_a_page_without_its_markers_is_left_alone(text) -> None:
    with pytest.raises(ValueError, match="once each"):
        table.replace(text, "rows")


def test_a_run_of_some_uses_replaces_their_rows_only() -> None:
    new = Row("a client", "2", "`a | b`", "ensemble", "works")
    order = [("a client", "`a | b`"), ("curl", "`/generate`"), ("another", "way")]
    assert table.merged(ROWS, [new], order) == [new, ROWS[0]]


def test_every_use_has_a_row_in_the_docs() -> None:
    written = [row.use for row in table.read(DOCS)]
    assert written == [(program.name, program.use) for program in PROGRAMS]
    assert len(set(written)) == len(written)


def test_no_row_passes_over_a_failure_in_silence() -> None:
    for row in table.read(DOCS):
        assert row.verdict.startswith("works") or len(row.verdict) > len("does not: "), row


def test_every_program_can_be_run_or_replayed() -> None:
    kept = recorded()
    for program in PROGRAMS:
        assert program.command or program.recorded, program
        assert not program.environment or program.environment in ENVIRONMENTS
        assert not program.source or program.recorded, f"{program.use}: nothing to send without its source"
        for key in program.recorded:
            assert request_of(kept[key]).inputs
