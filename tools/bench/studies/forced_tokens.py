"""The gain of tokens that a grammar forces: answers of long keys and short values, with and without drafts.

    python -m tridecode.tools.bench.studies.forced_tokens --preset llama-3-8b

Random weights, and a vocabulary of made-up words of the preset's size. Each line has the milliseconds per
token of a batch, its tokens per step of a sequence, and the tokens per second relative to the first line of
its batch, without speculation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.scheduler_factory import use_drafts
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.bench.studies.grammars import made_up_vocabulary

_KEYS = ("name_of_the_passenger", "departure_from_the_harbour", "arrival_at_the_other_harbour")
_ITEM = {
    "type": "object",
    "properties": {key: {"type": "boolean"} for key in _KEYS},
    "required": list(_KEYS),
    "additionalProperties": False,
}
#: no answer of a run is complete before its last token
_ANSWER = {"type": "array", "items": _ITEM, "minItems": 9000, "x-guidance": {"whitespace_pattern": ""}}
OUTPUT = StructuredOutput("json_schema", json.dumps(_ANSWER))
_MASK_THREADS = 8


def measure(job: Job, batches: list[int]) -> dict[int, tuple[float, float]]:
    """Return (milliseconds per token, tokens per step) of each batch size."""
    with open_engine(job) as engine:
        size = engine.model_config.vocab_size
        compiler = Guidance(made_up_vocabulary(size), list, _MASK_THREADS)
        grammars = Grammars(compiler, size, [size - 1], 0.1, _MASK_THREADS)
        try:
            runner = LoopRunner(engine, grammars=grammars)
            if job.speculation != "off":
                use_drafts(engine, runner.scheduler)
            found = {}
            for count in (batches[0], *batches):  # the first run warms up
                prompts = random_prompts(count, job.prompt_tokens, min(size, 30_000), 1)
                runner.generate(prompts, job.output_tokens, [OUTPUT] * count)
                run = runner.take_run()
                times = [one[-1] - one[0] for one in run.token_times]
                decoded = job.output_tokens - 1
                steps = sum(step.decodes for step in run.steps)
                found[count] = 1e3 * max(times) / decoded, count * decoded / max(steps, 1)
            return found
        finally:
            grammars.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=129)
    parser.add_argument("--speculation", default="off,lookup", help="off first")
    arguments = parser.parse_args()
    batches = [int(text) for text in arguments.batches.split(",")]
    job = Job(
        preset=arguments.preset,
        batches=(max(64, 4 * max(batches)),),  # slots: a row with drafts takes several samples of a step
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    first: dict[int, float] = {}
    for kind in arguments.speculation.split(","):
        for count, (ms, per_step) in measure(replace(job, speculation=kind), batches).items():
            first.setdefault(count, ms)
            print(
                f"{kind:>8} {count:4} sequences: {ms:8.3f} ms per token, {per_step:5.2f} tokens per step, "
                f"{first[count] / ms:6.3f} x the tokens per second",
                flush=True,
            )


if __name__ == "__main__":
    main()
