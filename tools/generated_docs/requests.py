"""Generates the tables of docs/reference/requests.md from the contracts and the sampling parameters.

    python -m tridecode.tools.generated_docs.requests --write

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Without --write the exit code is 1 if a
table of the page is out of date.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from typing import Any

from tridecode.backend.doors.contracts.field import Contract, Field
from tridecode.backend.doors.contracts.vllm import KEYS
from tridecode.backend.wire.sampling_params import SamplingParams, parameters
from tridecode.model_repo_templates.repository import CONTRACTS
from tridecode.tools.generated_docs import tables as doc_tables
from tridecode.tools.generated_docs.tables import DOCS, markdown, write_or_compare

PAGE = DOCS / "reference" / "requests.md"
_WIDTH = 120


def updated(page: str) -> str:
    """Return the page with new tables. Raises KeyError for a marker with an unknown name."""
    return doc_tables.updated(page, tables())


def tables() -> dict[str, str]:
    """Return the Markdown of each table by the name in its marker."""
    made = {"sampling": sampling_table(), "vllm keys": vllm_keys(), "vllm refused keys": refused_vllm_keys()}
    for name, contract in CONTRACTS.items():
        made[f"{name} inputs"] = input_table(contract)
        made[f"{name} refused"] = refused_inputs(contract)
        made[f"{name} outputs"] = output_table(contract)
    return made


def sampling_table(table: type[SamplingParams] = SamplingParams) -> str:
    """Return the table of ranges; the meanings are in the contracts."""
    tokens = {field.param: f"`{field.name}`" for field in CONTRACTS["fastertransformer"].params}
    rows = [
        (f"`{row.name}`", tokens.get(row.name, "none"), row.range.wanted)
        for row in parameters(table)
        if row.range
    ]
    return markdown(("text models", "token ids", "range"), rows)


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
            shape = _shape(field, contract) if contract.batched else _unbatched_shape(field)
            rows.append((f"`{field.name}`" + "".join(older), field.dtype, shape, meaning, default))
    return markdown(("input", "type", "shape", "meaning", "default"), rows)


def refused_inputs(contract: Contract) -> str:
    """Return one sentence; "" if the contract refuses no input."""
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
    return markdown(("output", "type", "meaning"), rows) + (f"\n\n{told}" if never else "")


def _shape(field: Field, contract: Contract) -> str:
    if contract.leading_axis:
        inner = _shape(replace(field, dims=field.dims[1:]), replace(contract, leading_axis=False))
        return "[1, " + inner[1:]
    if field.kind in ("value", "prompt", "csv"):  # one per row, even where the contract declares -1
        return "[B, 1]"
    names = iter("nm")
    return f"[B, {', '.join(next(names) if size < 0 else str(size) for size in field.dims)}]"


def _unbatched_shape(field: Field) -> str:
    names = iter("B" if field.kind == "prompt" else "nm")
    return f"[{', '.join(next(names) if size < 0 else str(size) for size in field.dims)}]"


def vllm_keys() -> str:
    rows = [(f"`{key.name}`", key.meaning, key.default, key.in_words) for key in KEYS if not key.refused]
    return markdown(("key", "meaning", "default", "range"), rows)


def refused_vllm_keys() -> str:
    neutral = {key.name: [value for value in key.neutral if value is not None] for key in KEYS if key.refused}
    texts = [
        f"`{name}`" + (f" other than {_value(values[0])}" if values else "")
        for name, values in neutral.items()
    ]
    return textwrap.fill(f"Refused: {', '.join(texts)}.", _WIDTH)


def _value(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "an empty one"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value in (b"", "") else f"{value:g}"


def main(arguments: list[str]) -> int:
    return write_or_compare(
        {PAGE: tables()}, "--write" in arguments, "python -m tridecode.tools.generated_docs.requests"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
