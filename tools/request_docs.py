"""The tables of docs/requests.md, made from the contracts and from the table of sampling parameters.

    python -m tridecode.tools.request_docs --write

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Without --write: exit code 1 if a table
of the page is not the one that would be written.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tridecode.backend.doors.contracts.field import Contract, Field
from tridecode.backend.sampling_params import SamplingParams, parameters
from tridecode.model_repo_templates.repository import CONTRACTS

PAGE = Path(__file__).parents[1] / "docs" / "requests.md"
_WIDTH = 120
_BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """The page with new tables. Raises KeyError for a marker that names no table."""
    made = tables()
    return _BLOCK.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", page)


def tables() -> dict[str, str]:
    """Name in a marker -> Markdown."""
    made = {"sampling": sampling_table()}
    for name, contract in CONTRACTS.items():
        made[f"{name} inputs"] = input_table(contract)
        made[f"{name} refused"] = refused_inputs(contract)
        made[f"{name} outputs"] = output_table(contract)
    return made


def sampling_table(table: type[SamplingParams] = SamplingParams) -> str:
    """The ranges; contracts say what a parameter means."""
    tokens = {field.param: f"`{field.name}`" for field in CONTRACTS["fastertransformer"].params}
    rows = [
        (f"`{row.name}`", tokens.get(row.name, "none"), row.range.wanted)
        for row in parameters(table)
        if row.range
    ]
    return _markdown(("text models", "token ids", "range"), rows)


def input_table(contract: Contract, table: type[SamplingParams] = SamplingParams) -> str:
    known = {row.name: row for row in parameters(table)}
    rows = []
    for field in contract.inputs:
        if field.declared and not field.refused and not field.alias_of:
            older = [f" (`{other.name}`)" for other in contract.inputs if other.alias_of == field.name]
            param = known.get(field.param)
            meaning = field.meaning or (param.meaning if param else "")
            default = field.default or (_value(param.default) if param else "")
            if field.required:
                default = "required"
            rows.append((f"`{field.name}`" + "".join(older), field.dtype, _shape(field), meaning, default))
    return _markdown(("input", "type", "shape", "meaning", "default"), rows)


def refused_inputs(contract: Contract) -> str:
    """One sentence; "" where the contract has no such input."""
    fields = [field for field in contract.inputs if field.declared and field.refused]
    neutral = [f"`{field.name}` other than {_value(field.neutral[0])}" for field in fields if field.neutral]
    always = [f"`{field.name}`" for field in fields if not field.neutral]
    return textwrap.fill(f"Refused: {', '.join(neutral + always)}.", _WIDTH) if fields else ""


def output_table(contract: Contract) -> str:
    rows = [
        (f"`{output.name}`", output.dtype, output.meaning) for output in contract.outputs if output.meaning
    ]
    never = ", ".join(f"`{output.name}`" for output in contract.outputs if not output.meaning)
    told = textwrap.fill(f"Declared and never sent: {never}.", _WIDTH)
    return _markdown(("output", "type", "meaning"), rows) + (f"\n\n{told}" if never else "")


def _shape(field: Field) -> str:
    if field.kind in ("value", "prompt", "csv"):  # one per row, even where the contract declares -1
        return "[B, 1]"
    names = iter("nm")
    return f"[B, {', '.join(next(names) if size < 0 else str(size) for size in field.dims)}]"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == b"" else f"{value:g}"


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if "--write" in arguments:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print(f"{PAGE} has old tables; run python -m tridecode.tools.request_docs --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
