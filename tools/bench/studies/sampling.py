"""Measures what sampling rules add to a decode step.

    python -m tridecode.tools.bench.studies.sampling [--preset llama-3-8b] [--rows 64] [--repeats 3]
        [--output FILE]

Each rule's requests alternate with requests that draw from the whole vocabulary, on one engine. A figure is
the median time between decode steps in which all rows run; the ratio is the median over the repeats of a
rule's figure divided by the figure before it.
"""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.sampling_params import MAX_BIASES
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.bench.studies.pairs import Pairs, steady_ms, study_parser

_PLAIN = SamplingParams(top_k=0, seed=7)


def rules(vocab_size: int) -> dict[str, SamplingParams]:
    """Return the parameters of each rule by its name."""
    ids = np.random.default_rng(0).permutation(vocab_size).tolist()
    few, many = ({token: float(token % 7 - 3) for token in ids[:count]} for count in (300, MAX_BIASES))

    def plus(**values: object) -> SamplingParams:
        return msgspec.structs.replace(_PLAIN, **values)

    return {
        "nothing": _PLAIN,
        "logit_bias of 300 ids": plus(logit_bias=few),
        f"logit_bias of {MAX_BIASES} ids": plus(logit_bias=many),
        "min_p 0.05": plus(min_p=0.05),
        # random weights give flat logits: a model's own are as sharp as these
        "min_p 0.05, temperature 0.2": plus(min_p=0.05, temperature=0.2),
        "n-grams of 3": plus(no_repeat_ngram_size=3),
        "all three": plus(logit_bias=few, min_p=0.05, no_repeat_ngram_size=3),
        "typical_p 0.9": plus(typical_p=0.9),
        "typical_p 0.9, top_k 50": plus(typical_p=0.9, top_k=50),
    }


def step_ms(engine: Engine, prompts: list[list[int]], tokens: int, params: SamplingParams) -> float:
    """Return the median milliseconds between two steps in which every prompt has a decode row."""
    runner = LoopRunner(engine, params=params)
    runner.generate(prompts, tokens)
    return steady_ms(runner, len(prompts))


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--output-tokens", type=int, default=96)
    arguments = parser.parse_args()
    tokens, found = arguments.output_tokens, Pairs(arguments.repeats)
    job = make_job(
        arguments.preset, None, None,
        batches=(arguments.rows,), prompt_tokens=arguments.prompt_tokens, output_tokens=tokens,
    )  # fmt: skip
    with open_engine(job) as engine:
        vocab_size = engine.model_config.vocab_size
        prompts = random_prompts(arguments.rows, arguments.prompt_tokens, vocab_size, 0)
        step_ms(engine, prompts, tokens, _PLAIN)  # warms up
        for name, params in rules(vocab_size).items():
            measure = partial(step_ms, engine, prompts, tokens)
            found.compare({"rule": name}, partial(measure, _PLAIN), partial(measure, params))
    found.write(arguments.output)


if __name__ == "__main__":
    main()
