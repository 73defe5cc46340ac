"""Measures what LoRA adapters add to a decode step.

    python -m tridecode.tools.bench.studies.adapters [--preset llama-3-8b] [--quantization int8]
        [--rows 64] [--rank 16] [--repeats 3] [--output FILE]

Random weights, and random adapters that change every matrix. Requests without an adapter alternate with
requests for one or more adapters, on one engine. A figure is the median time between decode steps in which
all rows run; the ratio is the median over the repeats of a case's figure divided by the figure before it.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from tridecode.backend.engine.adapters.place import Place
from tridecode.backend.engine.adapters.store import AdapterStore
from tridecode.backend.engine.adapters.tables import AdapterTables
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.parts.adapters import form_of
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.weights.lora_tensors import Lora
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.kernel_classes import plain_name
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.bench.studies.pairs import Pairs, steady_ms, study_parser

_REPLAYS = 20
_SCALE = 0.02  # standard deviation of the random matrices


class RandomAdapters(AdapterStore):
    """Creates a random adapter of all matrices for any name, instead of reading one."""

    def __init__(self, place: Place, max_loras: int, rank: int, tables: AdapterTables | None):
        super().__init__(Path("."), Path("."), place, max_loras, rank, tables=tables)
        self._rank = rank

    def read(self, name: str) -> Lora:
        """Return the adapter of this name, the same in every run. Matrices of one shape have the same pair,
        because it takes seconds to draw a pair for each.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        pair = cache(partial(self._pair, generator))
        shapes = {name: self._shape(name) for names in self.place.linears for name in names}
        return Lora({name: pair(*shape) for name, shape in shapes.items()})

    def _shape(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return the inputs of a matrix, and the outputs of each of its sections."""
        spec = self.place.specs[f"{name}.weight"]
        inputs, outputs = spec.shape
        return inputs, tuple(spec.sections if spec.axis == 1 and spec.sections else (outputs,))

    def _pair(
        self, generator: torch.Generator, inputs: int, sections: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a and b of one matrix, with separate ranks for each of its sections."""
        parts = [torch.randn(size, self._rank, generator=generator) * _SCALE for size in sections]
        a = torch.randn(self._rank * len(sections), inputs, generator=generator) * _SCALE
        return a, torch.block_diag(*parts)


def cases(rows: int) -> dict[str, list[str]]:
    """Return name of a case -> adapter of each row."""
    return {
        f"one row of {rows}": ["one", *[""] * (rows - 1)],
        f"one adapter, {rows} rows": ["one"] * rows,
        f"eight adapters, {rows} rows": [str(row % 8) for row in range(rows)],
    }


def step_ms(runner: LoopRunner, prompts: list[list[int]], tokens: int, names: list[str]) -> float:
    """Return the median milliseconds between two steps in which every prompt has a decode row."""
    runner.generate(prompts, tokens, adapters=names)
    return steady_ms(runner, len(prompts))


def profile(engine: Engine, store: AdapterStore, rows: int) -> None:
    """Print the microseconds of each kernel in replayed decode steps with empty contexts, for each case."""
    tables, columns = engine.state.adapter_tables, dict[str, defaultdict[str, float]]()
    assert tables is not None and engine.graphs is not None
    for number in range(8):
        store.load_now(number, str(number))
    slots: dict[str, list[int]] = {
        "plain": [],
        "one row": [tables.slot(0), *[-1] * (rows - 1)],
        "eight": [tables.slot(row % 8) for row in range(rows)],
    }
    for case, given in slots.items():
        form = form_of(np.array(given, np.int32))
        graphs = engine.part_graphs[AdapterRows, form] if given else engine.graphs
        tables.load(np.array(given, np.int32))
        graphs.replay(decode_plan(rows))
        engine.synchronize()
        started = time.perf_counter()
        for _ in range(_REPLAYS):
            graphs.replay(decode_plan(rows))
        engine.synchronize()
        columns[case] = defaultdict(float)
        columns[case]["total"] = 1e6 * (time.perf_counter() - started) / _REPLAYS
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(_REPLAYS):
                graphs.replay(decode_plan(rows))
            engine.synchronize()
        for event in profiler.key_averages():
            columns[case][plain_name(event.key)] += event.device_time_total / _REPLAYS
    names = sorted(
        {name for found in columns.values() for name in found}, key=lambda name: -columns["one row"][name]
    )
    for name in names[:20]:
        print(f"{name[:44]:44}" + "".join(f"{found[name]:12.1f}" for found in columns.values()), flush=True)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel instead")
    arguments = parser.parse_args()
    tokens, found = arguments.output_tokens, Pairs(arguments.repeats)
    job = make_job(
        arguments.preset, None, None,
        batches=(arguments.rows,), prompt_tokens=arguments.prompt_tokens, output_tokens=tokens,
        quantization=arguments.quantization,
    )  # fmt: skip
    with open_engine(replace(job, lora_path=".")) as engine:
        opened = engine.state.adapters
        assert opened is not None
        engine.state.adapters = RandomAdapters(
            opened.place, engine.config.max_loras, arguments.rank, engine.state.adapter_tables
        )
        if arguments.profile:
            profile(engine, engine.state.adapters, arguments.rows)
            return
        prompts = random_prompts(arguments.rows, arguments.prompt_tokens, engine.model_config.vocab_size, 0)
        runner = LoopRunner(engine)
        for name, adapters in cases(arguments.rows).items():
            runner.generate(prompts, 4, adapters=adapters)  # loads the adapters and warms up
            measure = partial(step_ms, runner, prompts, tokens)
            found.compare({"case": name}, partial(measure, []), partial(measure, adapters))
        engine.close()
    found.write(arguments.output)


if __name__ == "__main__":
    main()
