"""The first token of one prompt, with its step as a CUDA graph and launched operation by operation, in turns.

    python -m tridecode.tools.bench.studies.first_tokens --preset llama-3-8b [--quantization w8a8-int8]
        [--out FILE]

Milliseconds from the request to its first token in the decode loop that serves, without a server; medians.
Random weights; needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tridecode.backend.engine.device.engine import Engine
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.reports.report import environment
from tridecode.tools.bench.shapes.presets import FAMILY_PRESETS, PRESETS, QUANTIZATIONS, random_prompts

_ROUNDS, _RUNS, _WARM_UP = 3, 8, 3
_SLOTS = 64


def first_tokens(engine: Engine, lengths: list[int]) -> list[dict[str, Any]]:
    """{"prompt_tokens", "graph", "eager"} for each length; graph: None where a prompt has no graph."""
    runner, graphs = LoopRunner(engine), engine.prompt_graphs
    figures = []
    for length in lengths:
        taken: dict[str, list[float]] = {"graph": [], "eager": []}
        replayed = 0
        for name in ("eager", "graph") * _ROUNDS:
            engine.prompt_graphs = graphs if name == "graph" else None
            before = graphs.replayed if graphs is not None else 0
            for run in range(_RUNS):
                prompts = random_prompts(1, length, engine.model_config.vocab_size, run)
                seconds = runner.generate(prompts, 1)
                taken[name] += [1000 * seconds] if run >= _WARM_UP else []
            replayed += (graphs.replayed if graphs is not None else 0) - before
        medians = {name: round(statistics.median(values), 2) for name, values in taken.items()}
        figures.append({"prompt_tokens": length, **medians, **({} if replayed else {"graph": None})})
        print(figures[-1], flush=True)
    engine.prompt_graphs = graphs
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", required=True, choices=[*PRESETS, *FAMILY_PRESETS])
    parser.add_argument("--quantization", default="", choices=["", *QUANTIZATIONS])
    parser.add_argument("--int8-head", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--lengths", default="16,64,128,256,512,1000")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    job = Job(
        preset=given.preset,
        quantization=given.quantization,
        int8_head=given.int8_head,
        kv_cache_dtype=given.kv_cache_dtype,
        batches=(_SLOTS,),
        prompt_tokens=max(lengths),
        output_tokens=2,
    )
    with open_engine(job) as engine:
        figures = first_tokens(engine, lengths)
    if given.out:
        given.out.write_text(json.dumps({**environment(), "first_token_ms": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
