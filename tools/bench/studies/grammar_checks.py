"""Measures compilations of grammars with their check in another process, and refusals of endless grammars.

    python -m tridecode.tools.bench.studies.grammar_checks --tokenizer-dir FOLDER

Alternates compiling each schema alone, and checking and compiling it. "everyday" are variants of one record;
`--schemas FILE`, a JSON array, adds others. Times are wall-clock times from a request to its first mask, one
request after the other; ratios are relative to the compilation alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tridecode.backend.engine.grammars.checker import GrammarChecker
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.engine.grammars.vocabulary import read_vocabulary
from tridecode.backend.engine.grammars.warm_up import warm_up
from tridecode.backend.wire.structured_output import StructuredOutput

_PRIMES = (999_983, 999_979, 999_961, 999_959, 999_953, 999_931, 999_917, 999_907)


def everyday_schema(number: int) -> dict[str, Any]:
    """Return a record of 4 to 11 properties."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 150 + number},
        {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        {"enum": ["friend", "family", f"group {number}"]},
        {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
        {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
        {"type": "boolean"},
    ]
    properties = {f"field_{i}": kinds[(number + i) % len(kinds)] for i in range(4 + number % 8)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:3],
        "additionalProperties": False,
    }


class _Bench:
    def __init__(self, folder: Path, vocab_size: int, end_id: int, cpu_ms: float):
        vocabulary, encode = read_vocabulary(folder, vocab_size, [end_id])
        self._compiler = Guidance(vocabulary, encode, 1)
        warm_up(self._compiler, vocab_size)
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._checker = GrammarChecker(folder, vocab_size, [end_id], cpu_ms, 1)
        self._checker.check(StructuredOutput("regex", "a"), 0)

    def run(self, name: str, schemas: Sequence[Any], repeats: int) -> None:
        alone, checked, refused = [], [], 0
        for schema in list(schemas) * repeats:
            output = StructuredOutput("json_schema", json.dumps(schema))
            try:
                alone.append(_milliseconds(self._compile, output))
                checked.append(_milliseconds(self._check_and_compile, output))
            except GrammarFault:
                refused += 1
        print(f"{name}: {len(checked)} compiled, {refused} refused")
        for share in (50, 95, 99):
            one, both = np.percentile(alone, share), np.percentile(checked, share)
            print(f"  p{share}: alone {one:.2f} ms, with the check {both:.2f} ms, ratio {both / one:.2f}")

    def refuse(self) -> None:
        taken = []
        for prime in _PRIMES:
            output = StructuredOutput("json_schema", json.dumps({"type": "integer", "multipleOf": prime}))
            taken.append(_milliseconds(self._refused, output))
        print(f"endless: refused after {np.median(taken):.0f} ms (median), {max(taken):.0f} ms (largest)")

    def close(self) -> None:
        self._checker.close()

    def _compile(self, output: StructuredOutput) -> None:
        self._compiler.compile(prepare(output)).fill(self._mask)

    def _check_and_compile(self, output: StructuredOutput) -> None:
        self._compiler.compile(self._checker.check(output, 0)).fill(self._mask)

    def _refused(self, output: StructuredOutput) -> None:
        try:
            self._checker.check(output, 0)
        except GrammarFault:
            return
        raise AssertionError("an endless grammar was compiled")


def _milliseconds(work: Callable[[StructuredOutput], None], output: StructuredOutput) -> float:
    begun = time.perf_counter()
    work(output)
    return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--end-id", type=int, default=2)
    parser.add_argument("--grammar-cpu-ms", type=float, default=150.0)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    bench = _Bench(arguments.tokenizer_dir, arguments.vocab_size, arguments.end_id, arguments.grammar_cpu_ms)
    try:
        bench.run("everyday", [everyday_schema(i) for i in range(100)], arguments.repeats)
        if arguments.schemas is not None:
            bench.run(arguments.schemas.name, json.loads(arguments.schemas.read_text()), arguments.repeats)
        bench.refuse()
    finally:
        bench.close()


if __name__ == "__main__":
    main()
