"""The cost of answers that obey a grammar, for themselves and for their neighbours in the batch.

    python -m tridecode.tools.bench.studies.grammars --preset llama-3-8b

Random weights, and a vocabulary of made-up words of the preset's size. Each run has two rates: milliseconds
per token of the sequences with a grammar, and of those without. Ratios are to the runs of the same batch
without any grammar, before and after each run with some.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np

from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.matcher import Vocabulary
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.shapes.presets import random_prompts

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "array", "items": {"type": "string", "maxLength": 40}},
        "kind": {"enum": ["friend", "family", "work"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
#: no answer of a run is complete before its last token
OUTPUT = StructuredOutput("json_schema", json.dumps({"type": "array", "items": _PERSON, "minItems": 9000}))
_MASK_THREADS = 8


def made_up_vocabulary(size: int) -> Vocabulary:
    """Return bytes, marks of JSON, and words of 2 to 5 letters with and without a space; the last id ends."""
    tokens = [bytes([byte]) for byte in range(256)]
    marks = ['{"', '":', '", "', '"}', "},", ': "', "[]", '["', "  ", "\n  "]
    tokens += [mark.encode() for mark in marks]
    letters = "etaoinshrdlucmfw"
    words = ("".join(some) for count in (2, 3, 4, 5) for some in itertools.product(letters, repeat=count))
    for word in words:
        if len(tokens) >= size - 2:
            break
        tokens += [word.encode(), b" " + word.encode()]
    tokens = tokens[: size - 1] + [b"<end>"] * (size - min(len(tokens), size - 1))
    return Vocabulary(tokens, frozenset([size - 1]), [size - 1])


def _tokens_of(text: bytes) -> list[int]:
    return list(text)


class _Bench:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.job = Job(
            preset=arguments.preset,
            batches=(arguments.slots,),
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
        )

    def run(self) -> None:
        with open_engine(self.job) as engine:
            vocab_size = engine.model_config.vocab_size
            begun = time.perf_counter()
            compiler = Guidance(made_up_vocabulary(vocab_size), _tokens_of, _MASK_THREADS)
            print(f"vocabulary of {vocab_size:,}: {time.perf_counter() - begun:.2f} s")
            self._compile(compiler)
            grammars = Grammars(compiler, vocab_size, [vocab_size - 1], 0.1, _MASK_THREADS)
            self.runner = LoopRunner(engine, grammars=grammars)
            self._generate(min(8, self.arguments.slots), 8)  # warm-up
            print(f"{'batch':>24} {'plain':>9} {'grammar':>9} {'ratio':>7} {'neighbours':>11} {'ratio':>7}")
            for text in self.arguments.cases.split(","):
                constrained, plain = map(int, text.split("+"))
                self._case(constrained, plain)
            grammars.close()

    def _compile(self, compiler: Guidance) -> None:
        taken = []
        for i in range(20):
            schema = {**_PERSON, "title": str(i)}
            begun = time.perf_counter()
            matcher = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
            matcher.fill(np.zeros(-(-len(compiler._vocabulary.tokens) // 32), np.int32))
            taken.append(1e3 * (time.perf_counter() - begun))
        print(
            f"compile and first mask: median {statistics.median(taken):.2f} ms, largest {max(taken):.2f} ms"
        )

    def _case(self, constrained: int, plain: int) -> None:
        before = self._generate(0, constrained + plain)[1]
        found, neighbours = zip(*(self._generate(constrained, plain) for _ in range(self.arguments.repeats)))
        after = self._generate(0, constrained + plain)[1]
        base, mine = (before + after) / 2, statistics.median(found)
        line = f"{constrained:>10} + {plain:>4} plain   {base:9.3f} {mine:9.3f} {mine / base:7.3f}"
        if plain:
            other = statistics.median(neighbours)
            line += f" {other:11.3f} {other / base:7.3f}"
        print(line, flush=True)

    def _generate(self, constrained: int, plain: int) -> tuple[float, float]:
        """Return milliseconds per token of the sequences with and without a grammar, 0.0 for none."""
        count = constrained + plain
        prompts = random_prompts(count, self.arguments.prompt_tokens, 30_000, 1)
        # the two kinds take turns in the batch
        marks = [i * constrained // count != (i + 1) * constrained // count for i in range(count)]
        outputs = [OUTPUT if marked else None for marked in marks]
        self.runner.generate(prompts, self.arguments.output_tokens, outputs)
        times = self.runner.take_run().token_times
        return (
            _per_token([one for one, marked in zip(times, marks) if marked]),
            _per_token([one for one, marked in zip(times, marks) if not marked]),
        )


def _per_token(times: Sequence[Sequence[float]]) -> float:
    """Return the mean milliseconds between tokens, from the time at which every sequence decodes."""
    if not times:
        return 0.0
    begun = max(one[0] for one in times)
    rates = []
    for one in times:
        later = [at for at in one if at > begun]
        rates.append(1e3 * (later[-1] - later[0]) / max(len(later) - 1, 1))
    return statistics.mean(rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cases", default="1+0,64+0,256+0,1+63,16+48,64+192", help="sequences with a grammar + others"
    )
    _Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
