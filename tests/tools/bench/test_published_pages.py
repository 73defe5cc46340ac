"""README.md and docs/reference/benchmarks.md have the figures of one results file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tools" / "bench" / "results" / "2026-11-28-h200x2-published.json"
JOBS = json.loads(FILE.read_text(encoding="utf-8"))["jobs"]
LLAMA, BLOOM = "llama-3-8b", "bloom-7b1"
#: first cell of a row -> job, by page and heading
STEPS = {
    ("README.md", "Speed"): {
        "LLaMA-3-8B bf16": LLAMA,
        "LLaMA-3-8B, int8 weights and activations (W8A8), fp8 cache": f"{LLAMA}-w8a8",
        "LLaMA-3-8B, int8 weights": f"{LLAMA}-int8",
        "LLaMA-3-8B, int4 weights": f"{LLAMA}-int4",
        "BLOOM-7B1 fp16": BLOOM,
        "LLaMA-3-8B bf16 on two GPUs": f"{LLAMA}-tp2",
        "BLOOM-7B1 fp16 on two GPUs": f"{BLOOM}-tp2",
    },
    ("docs/reference/benchmarks.md", "LLaMA-3-8B"): {
        "bf16": LLAMA,
        "int8 weights": f"{LLAMA}-int8",
        "int4 weights, groups of 128": f"{LLAMA}-int4",
        "W8A8 int8, fp8 cache": f"{LLAMA}-w8a8",
        "bf16 on two GPUs": f"{LLAMA}-tp2",
    },
    ("docs/reference/benchmarks.md", "BLOOM-7B1"): {
        "fp16": BLOOM,
        "W8A8 int8, fp8 cache": f"{BLOOM}-w8a8",
        "fp16 on two GPUs": f"{BLOOM}-tp2",
    },
    ("docs/reference/benchmarks.md", "Other families"): {
        "Gemma-3-4B": "gemma-3-4b",
        "GPT-NeoX-20B": "gpt-neox-20b",
    },
    ("docs/reference/benchmarks.md", "Small models"): {
        "GPT-2": "gpt2",
        "BLOOM-560M (`--preset bloom-560m`)": "bloom-560m",
    },
}  # fmt: skip
ROWS = [(*place, label, job) for place, rows in STEPS.items() for label, job in rows.items()]


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """Return first cell -> other cells of the tables below a heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.split(f"\n## {heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in reversed(cells)}  # the first of equal rows


def figure(value: float) -> str:
    """Return three significant digits."""
    return f"{value:#.3g}".rstrip(".")


def expected(job: dict[str, Any], heading: str) -> Sequence[str]:
    figures = [figure(row["steady_step_ms"]) for row in job["rows"]]
    if heading == "Other families":
        figures = [f"{one} ({row['roof_ms']:.2f})" for one, row in zip(figures, job["rows"])]
    return figures


@pytest.mark.parametrize(("page", "heading", "label", "job"), ROWS)
def test_a_row_has_the_figures_of_the_file(page: str, heading: str, label: str, job: str) -> None:
    cells, found = rows_of(page, heading)[label], JOBS[job]
    if heading in ("LLaMA-3-8B", "BLOOM-7B1"):
        options, *cells = cells
        assert options.strip("`") in found["command"] and (options or "--quant" not in found["command"])
    wanted = expected(found, heading)
    assert cells[: len(wanted)] == wanted
    if len(cells) > 4:  # with a column of first tokens
        first = next(row["first_token_ms"] for row in found["rows"] if row["batch"] == 64)
        assert cells[-1].partition(" ")[0] == f"{first:.0f}"


def test_the_loads_of_chats_have_the_figures_of_the_file() -> None:
    rows = rows_of("docs/reference/benchmarks.md", "A load of chats")
    for label, job in (("bf16", "chats"), ("W8A8 int8, fp8 cache", "chats-w8a8")):
        assert rows[label][1] == f"{JOBS[job]['rows'][0]['tokens_per_s']:,.0f}"


def test_every_measured_row_of_steps_is_printed() -> None:
    in_text = {"chats", "chats-w8a8", f"{LLAMA}-int8-head-inputs"}
    assert set(JOBS) == {job for *_, job in ROWS} | in_text
