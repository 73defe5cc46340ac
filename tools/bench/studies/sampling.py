"""Measures what sampling rules add to a decode step.

    python -m tridecode.tools.bench.studies.sampling [--preset llama-3-8b] [--rows 64] [--repeats 3]
        [--output FILE]

Each rule's requests alternate with requests that draw from the whole vocabulary, on one engine. A figure is
the median time between decode steps in which all rows run; the ratio is the median over the repeats of a
rule's figure divided by the figure before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import msgspec
import numpy as np

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.sampling_params import MAX_BIASES
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import steady_gaps
from tridecode.tools.bench.shapes.presets import random_prompts

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
    return 1000 * statistics.median(steady_gaps(runner.take_run().steps, len(prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tokens, found = arguments.output_tokens, []
    job = make_job(
        arguments.preset, None, None,
        batches=(arguments.rows,), prompt_tokens=arguments.prompt_tokens, output_tokens=tokens,
    )  # fmt: skip
    with open_engine(job) as engine:
        vocab_size = engine.model_config.vocab_size
        prompts = random_prompts(arguments.rows, arguments.prompt_tokens, vocab_size, 0)
        step_ms(engine, prompts, tokens, _PLAIN)  # warms up
        for name, params in rules(vocab_size).items():
            pairs = [
                (step_ms(engine, prompts, tokens, _PLAIN), step_ms(engine, prompts, tokens, params))
                for _ in range(arguments.repeats)
            ]
            ratio = statistics.median(rule / plain for plain, rule in pairs)
            plain, rule = (statistics.median(column) for column in zip(*pairs))
            found.append({"rule": name, "plain_ms": plain, "ms": rule, "ratio": ratio})
            print(f"{name:28} {plain:8.3f} ms {rule:8.3f} ms  x {ratio:.4f}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
