"""Measures tokens per second of two pipeline stages, alternating between one and two plans in flight.

With two, each plan has a share of the sequences, tokens go to every rank, and GPUs use no decode graphs.

    python -m tests.backend.engine.pipeline_rates --rounds 12 --batches 1 4 16 64
    python -m tests.backend.engine.pipeline_rates --device cuda --preset llama-3-8b

The model has random weights; without --preset it is small and in fp32. The output has the medians, the median
ratio of the rounds, and the processor time that other processes used. On one GPU both stages share the card,
which makes the figures meaningless.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.ranks.agreement import PlanOrder
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.tools.bench.engines.ours import LoopRunner
from tridecode.tools.bench.neighbours import Neighbours
from tridecode.tools.bench.shapes.presets import preset

HIDDEN, LAYERS, VOCAB = 256, 8, 8192
PROMPT = 16  # tokens
STEPS = {1: 60, 4: 60, 16: 40, 64: 24}  # steps of a run by number of sequences, about half a second
MODEL = ModelConfig(
    "llama", "small", LAYERS, HIDDEN, HIDDEN // 32, HIDDEN // 32, 32, 704, VOCAB, 1024, 1e-5, 1, 2, "fp32",
    "silu", RopeConfig(32), attention_bias=False, mlp_bias=False, tied_head=False,
)  # fmt: skip


def load(rank: int, meeting: str, kind: str, name: str) -> Engine:
    torch.set_num_threads(1)
    model, dtype = (preset(name).model, preset(name).dtype) if name else (MODEL, "fp32")
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    config = EngineConfig(
        pipeline_para_size=2, device=kind, data_type=dtype, weights="random",
        cache_bytes=256 << 20 if kind == "cpu" else None, max_sequence_tokens=512,
    )  # fmt: skip
    ranks = ProcessRanks(rank, 1, 2, meeting, device)
    return load_engine(Path("."), model, resolve(config, model, device), ranks, device)


class Modes:
    """An engine of two stages, with several plans in flight or not."""

    def __init__(self, engine: Engine):
        self.engine, self._graphs = engine, engine.graphs

    def set(self, pipelined: bool) -> None:
        self.engine.ranks.is_pipelined = pipelined  # type: ignore[misc]
        self.engine.graphs = self._graphs if pipelined else None


def runs(rounds: int, batches: list[int]) -> Iterator[tuple[int, bool]]:
    """Yield (sequences, whether two plans are in flight) of each run, after a warm-up run."""
    yield batches[0], False
    for number in range(rounds):
        for batch in batches:
            first = bool(number % 2)
            yield from ((batch, first), (batch, not first))


def follower(meeting: str, rounds: int, batches: list[int], kind: str, name: str) -> None:
    engine = load(1, meeting, kind, name)
    modes = Modes(engine)
    for _, pipelined in runs(rounds, batches):
        modes.set(pipelined)
        engine.ranks._order = PlanOrder(1)  # type: ignore[union-attr]
        follow(engine, RankStatus())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="", help="the shape and dtype of a preset of tridecode bench")
    given = parser.parse_args()
    rates: dict[tuple[int, bool], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Neighbours() as neighbours:
        meeting = f"file://{folder}/ranks"
        arguments = (meeting, given.rounds, given.batches, given.device, given.preset)
        other = multiprocessing.get_context("spawn").Process(target=follower, args=arguments, daemon=True)
        other.start()
        engine = load(0, meeting, given.device, given.preset)
        modes = Modes(engine)
        for batch, pipelined in runs(given.rounds, given.batches):
            modes.set(pipelined)
            prompts = [[number % 50 + 3] * PROMPT for number in range(batch)]
            seconds = LoopRunner(engine).generate(prompts, STEPS[batch])
            engine.ranks.broadcast_plan(None)
            rates[batch, pipelined].append(batch * STEPS[batch] / seconds)
        other.join()
    rates[given.batches[0], False].pop(0)
    for batch in given.batches:
        one, two = rates[batch, False], rates[batch, True]
        ratio = statistics.median(b / a for a, b in zip(one, two, strict=True))
        medians = f"{statistics.median(one):.1f} and {statistics.median(two):.1f} tokens/s"
        print(f"{batch} sequences, one plan and two: {medians}, ratio {ratio:.2f}")
    print(f"others used {neighbours.cores:.2f} processors")


if __name__ == "__main__":
    main()
