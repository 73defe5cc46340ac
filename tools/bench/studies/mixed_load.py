"""Measures what a few requests with log-probs and adapters cost all requests of a load of chats.

    python -m tridecode.tools.bench.studies.mixed_load [--preset llama-3-8b] [--quantization int8]
        [--case both ...] [--requests 200] [--rows 64] [--repeats 3] [--output FILE]

All requests are sent at once, and `rows` of them run at a time; lengths are those of `bench mix`. 2 % of the
requests want the 20 most likely tokens, 10 % have one of eight adapters of rank 16 with random weights, which
are loaded before. Runs with and without these fields alternate on one engine. The requests are otherwise the
same and share all steps, so the tokens per second of the other requests change by the ratio of the times.
"""

from __future__ import annotations

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
            shares = CASES[name]
            found.compare(
                {"case": name},
                partial(load_ms, runner, prompts, outputs, (0.0, 0.0)),
                partial(load_ms, runner, prompts, outputs, shares),
            )
    found.write(arguments.output)


if __name__ == "__main__":
    main()
