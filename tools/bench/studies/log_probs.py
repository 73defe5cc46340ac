"""Measures what the most likely tokens, and logits and vectors of prompts, add to decode steps.

    python -m tridecode.tools.bench.studies.log_probs [--preset llama-3-8b] [--rows 64] [--repeats 3]
        [--output FILE]

Each case alternates with plain requests on one engine. The first table has the median time between steps in
which all rows decode and no prompt runs. The second table has the mean time of steps while prompts of 128
tokens join the decoding rows one by one. A ratio is the median over the repeats of a case's figure divided by
the preceding plain figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.bench.studies.pairs import Pairs, steady_ms, study_parser

_PLAIN = SamplingParams(top_k=0, seed=7)
_TOKENS = 96  # new tokens of a decoding row
#: prompt tokens of a request that joins decoding rows; they fit into a graph
_PROMPT = 128
#: seconds between requests that join
_GAP_S = 0.02
#: slots beyond the decoding rows
_SPARE = 8

Case = Callable[[int], list[SamplingParams]]


def _plus(**values: object) -> SamplingParams:
    return msgspec.structs.replace(_PLAIN, **values)


def _first(count: int, special: SamplingParams) -> Case:
    """Return the case in which the first `count` rows are special; 0: all."""
    return lambda rows: [special if row < (count or rows) else _PLAIN for row in range(rows)]


#: params of the rows
ROWS: dict[str, Case] = {
    "nothing": _first(0, _PLAIN),
    "20 tokens, one row": _first(1, _plus(top_log_probs=20)),
    "20 tokens, all rows": _first(0, _plus(top_log_probs=20)),
    "5 tokens, all rows": _first(0, _plus(top_log_probs=5)),
    "20 tokens and a bias, all rows": _first(0, _plus(top_log_probs=20, logit_bias={5: 1.0, 9: -2.0})),
    "20 tokens and n-grams, one row": _first(1, _plus(top_log_probs=20, no_repeat_ngram_size=3)),
}
#: params of the prompts that join decoding rows
PROMPTS = {
    "nothing": _PLAIN,
    "log-prob of the prompt": _plus(return_context_log_prob=True),
    "logits of the prompt": _plus(return_context_logits=True),
    "mean vector of the prompt": _plus(pooling="mean"),
}


def decode_ms(engine: Engine, prompts: list[list[int]], params: Sequence[SamplingParams]) -> float:
    """Return the median milliseconds between two steps in which every prompt has a decode row."""
    runner = LoopRunner(engine, params=params)
    runner.generate(prompts, _TOKENS)
    return steady_ms(runner, len(prompts))


class _Spaced(LoopRunner):
    """Submits `rows` requests at once and the others one by one, every `gap` seconds from `after` on."""

    rows, after, gap = 0, 0.0, 0.0

    def _arrivals(self, count: int) -> Sequence[float]:
        later = [self.after + number * self.gap for number in range(count - self.rows)]
        return [0.0] * self.rows + later


def mixed_ms(
    engine: Engine,
    prompts: list[list[int]],
    special: SamplingParams,
    after: float = 0.0,
    gap: float = 0.0,
    count: int = 12,
) -> float:
    """Return the mean milliseconds of a step while `count` prompts join the decoding rows one by one.

    after: seconds until the first of them, when all of `prompts` decode. gap: seconds between them.
    """
    rows = len(prompts)
    others = [prompts[-1][:_PROMPT]] * count
    runner = _Spaced(engine, params=[_PLAIN] * rows + [special] * count)
    runner.rows, runner.after, runner.gap = rows, after, gap
    runner.generate(prompts + others, [_TOKENS] * rows + [2] * count)
    steps, begun = runner.take_run().steps, runner.take_run().arrivals[rows]
    mixed = [at for at, step in enumerate(steps) if step.decodes and step.prompt_tokens and step.time > begun]
    first, last = mixed[0], mixed[-1]
    return 1000 * (steps[last].time - steps[first].time) / (last - first)


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    rows, found = arguments.rows, Pairs(arguments.repeats)
    job = make_job(
        arguments.preset, None, None,
        batches=(rows + _SPARE,), prompt_tokens=arguments.prompt_tokens, output_tokens=_TOKENS,
    )  # fmt: skip

    def compare(title: str, name: str, usual: Callable[[], float], wanted: Callable[[], float]) -> None:
        found.compare({"table": title, "case": name}, usual, wanted, width=32)

    with open_engine(job) as engine:
        prompts = random_prompts(rows, arguments.prompt_tokens, engine.model_config.vocab_size, 0)
        plain = [_PLAIN] * rows
        decode_ms(engine, prompts, plain)  # warms up
        begun = time.perf_counter()
        decoding_s = _TOKENS * decode_ms(engine, prompts, plain) / 1000
        after = time.perf_counter() - begun - decoding_s
        mixed = partial(mixed_ms, engine, prompts, after=after + 2 * _GAP_S, gap=_GAP_S)
        for name, case in ROWS.items():
            params = case(rows)
            compare(
                "rows",
                name,
                partial(decode_ms, engine, prompts, plain),
                partial(decode_ms, engine, prompts, params),
            )
        for name, one in PROMPTS.items():
            compare(
                "mixed",
                name,
                partial(mixed, _PLAIN),
                partial(mixed, one),
            )
    found.write(arguments.output)


if __name__ == "__main__":
    main()
