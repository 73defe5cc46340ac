"""Measures what a few requests with log-probs and adapters cost all requests of a load of chats.

    python -m tridecode.tools.bench.studies.mixed_load [--preset llama-3-8b] [--quantization int8]
        [--case both ...] [--requests 200] [--rows 64] [--repeats 3] [--output FILE]

All requests are sent at once, and `rows` of them run at a time; lengths are those of `bench mix`. 2 % of the
requests want the 20 most likely tokens, 10 % have one of eight adapters of rank 16 with random weights, which
are loaded before. Runs with and without these fields alternate on one engine. The requests are otherwise the
same and share all steps, so the tokens per second of the other requests change by the ratio of the times.
Below each case: steps of its last run of either side, those that only decode apart from those with prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec.structs import replace as with_fields

from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.load.workloads import mix_requests
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Step
from tridecode.tools.bench.studies.adapters import RandomAdapters
from tridecode.tools.bench.studies.pairs import Pairs, study_parser

_PLAIN = SamplingParams(top_k=0, seed=7)
_LOG_PROBS, _ADAPTERS = 0.02, 0.1  # shares of the requests
_NUM_ADAPTERS, _RANK = 8, 16
_WARM_UP_TOKENS = 8

#: name of a case -> share of requests with log-probs, and with an adapter
CASES = {
    "both": (_LOG_PROBS, _ADAPTERS),
    "2 % with 20 log-probs": (_LOG_PROBS, 0.0),
    "10 % with an adapter": (0.0, _ADAPTERS),
}


def fields_of(count: int, log_probs: float, adapters: float) -> tuple[list[SamplingParams], list[str]]:
    """Return params and adapter of each of `count` requests; the same requests are drawn for equal shares."""
    draw = np.random.default_rng(0)
    wants, has = draw.random(count) < log_probs, draw.random(count) < adapters
    params = [with_fields(_PLAIN, top_log_probs=20) if want else _PLAIN for want in wants]
    return params, [str(number % _NUM_ADAPTERS) if one else "" for number, one in enumerate(has)]


def load_ms(
    runner: LoopRunner,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    shares: tuple[float, float],
) -> float:
    """Return the milliseconds until all requests of a load have their answers."""
    runner.params, adapters = fields_of(len(prompts), *shares)
    return 1000 * runner.generate(prompts, outputs, adapters=adapters)


def time_by_kind(steps: Sequence[Step]) -> dict[str, tuple[int, float]]:
    """Return the number of steps that only decode and of those with prompts, and their mean milliseconds.

    A step's time is that since the end of the step before; the first step has none.
    """
    gaps: dict[str, list[float]] = {"decode": [], "with prompts": []}
    for before, step in zip(steps, steps[1:]):
        gaps["with prompts" if step.prompt_tokens else "decode"].append(1000 * (step.time - before.time))
    return {kind: (len(found), statistics.fmean(found)) for kind, found in gaps.items() if found}


def compare(
    found: Pairs, runner: LoopRunner, prompts: Sequence[Sequence[int]], outputs: Sequence[int], case: str
) -> None:
    """Compare the loads without fields and with those of `case`; add the times of their steps."""
    kinds: dict[str, dict[str, tuple[int, float]]] = {}

    def measure(side: str, shares: tuple[float, float]) -> float:
        ms = load_ms(runner, prompts, outputs, shares)
        kinds[side] = time_by_kind(runner.take_run().steps)
        return ms

    found.compare(
        {"case": case}, partial(measure, "plain", (0.0, 0.0)), partial(measure, "fields", CASES[case])
    )
    found.found[-1]["steps"] = kinds
    for side, by_kind in kinds.items():
        texts = (f"{count:6} {kind} {ms:7.3f} ms" for kind, (count, ms) in by_kind.items())
        print(f"  {side:7}{', '.join(texts)}", flush=True)


def warm_up(runner: LoopRunner, prompts: Sequence[Sequence[int]]) -> None:
    """Load all adapters, and run a few steps with and without each field."""
    runner.params = [with_fields(_PLAIN, top_log_probs=20), _PLAIN] * _NUM_ADAPTERS
    names = [str(number) for number in range(_NUM_ADAPTERS)]
    runner.generate(prompts[: 2 * _NUM_ADAPTERS], _WARM_UP_TOKENS, adapters=[*names, *[""] * _NUM_ADAPTERS])


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    arguments = parser.parse_args()
    job = make_job(
        arguments.preset, None, None,
        batches=(arguments.rows,), prompt_tokens=1024, output_tokens=512,
        quantization=arguments.quantization,
    )  # fmt: skip
    found = Pairs(arguments.repeats)
    with open_engine(replace(job, lora_path=".")) as engine:
        opened = engine.state.adapters
        assert opened is not None
        store = RandomAdapters(opened.place, engine.config.max_loras, _RANK, engine.state.adapter_tables)
        engine.state.adapters = store
        runner = LoopRunner(engine)
        prompts, outputs = mix_requests(engine.model_config.vocab_size, arguments.requests)
        warm_up(runner, prompts)
        for name in arguments.case:
            compare(found, runner, prompts, outputs, name)
    found.write(arguments.output)


if __name__ == "__main__":
    main()
