"""Lower bound of the time of a decode step on one H200, and the share of it that measured runs reach.

    python -m tridecode.tools.bench.studies.floors

A floor is the time to read keys, values and logits, plus the longer of reading the weights and multiplying
them, since attention and GEMMs alternate. Weights are the matrices, scales and biases of the layers, and the
head; of an embedding that is not the head only a few rows are read, which are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from tridecode.backend import models
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import stored_specs
from tridecode.tools.bench.measure import Job

#: bytes/s of copies on an H200, reads and writes together, and FLOP/s of 8192-square products, both measured;
#: twice as many are assumed where both operands have 8 bits
BANDWIDTH, PEAK = 4.3e12, 790e12
#: bytes/s of reads alone on an H200, measured
READS = 4.46e12
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1, "fp8": 1, "int32": 4}
_SCALE_BYTES = 4  # of a token and head in an 8-bit cache
RESULTS = Path(__file__).parents[1] / "results"
_STEM, _LATER = "2026-11-23-h200-engine-", "2026-11-25-h200-engine-"
_ALONE = "2026-11-26-h200-engine-{}-one-sequence"
ROWS = (1, 8, 64, 256)


class Bars(NamedTuple):
    """A run of `tridecode bench engine` on one H200, and issue 13's bars: ms per step at ROWS, and to the
    first token of 64 prompts.
    """

    title: str
    stem: str  # of the result
    steps: tuple[float, float, float, float]
    first: float | None
    alone: bool = False  # whether there is a later result of one sequence (_ALONE)

    def result(self) -> dict[str, Any]:
        """Read the result, completed with the batch that was measured later on its own."""
        found = _read(self.stem)
        if self.alone:
            later = _read(_ALONE.format(self.stem.removeprefix(_STEM).removeprefix(_LATER)))
            found["results"]["tridecode"]["batches"][0] = later["results"]["tridecode"]["batches"][0]
        return found


def _read(stem: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8")))


RUNS = (
    Bars("BLOOM-7B1 fp16", f"{_LATER}bloom-7b1", (3.7, 4.2, 8.2, 22.5), 640, True),
    Bars("– int8, int8 head", f"{_LATER}bloom-7b1-int8-int8-head", (2.2, 2.6, 6.4, 22), None, True),
    Bars(
        "– W8A8 int8, fp8 cache, int8 head",
        f"{_LATER}bloom-7b1-w8a8-int8-fp8-cache-int8-head",
        (2.25, 2.45, 4.6, 12.3),
        410,
        True,
    ),
    Bars("LLaMA-3-8B bf16", f"{_LATER}llama-3-8b", (3.9, 4.05, 5.4, 11.2), 700, True),
    Bars("– int8, int8 head", f"{_STEM}llama-3-8b-int8-int8-head", (2.25, 2.4, 3.7, 11.4), None, True),
    Bars("– int4, int8 head", f"{_LATER}llama-3-8b-int4-int8-head", (1.6, 1.75, 3.4, 11.5), None, True),
    Bars("– W8A8 int8", f"{_LATER}llama-3-8b-w8a8-int8", (2.3, 2.4, 3.7, 8.8), 450),
    Bars(
        "– W8A8 int8, fp8 cache, int8 head",
        f"{_LATER}llama-3-8b-w8a8-int8-fp8-cache-int8-head",
        (2.3, 2.4, 3.2, 6.9),
        450,
        True,
    ),
    Bars(
        "– W8A8 fp8, fp8 cache, int8 head",
        f"{_STEM}llama-3-8b-w8a8-fp8-fp8-cache-int8-head",
        (2.3, 2.4, 3.2, 6.9),
        450,
    ),
    Bars(
        "– W8A8 fp8 in blocks, fp8 cache, int8 head",
        f"{_STEM}llama-3-8b-w8a8-fp8-blocks-fp8-cache-int8-head",
        (2.3, 2.4, 3.2, 6.9),
        450,
    ),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads and weights that it multiplies. weights: bytes, read once. multiplied: number
    of weights of the layers, multiplied with every row. head: those of the head, multiplied with the sampled
    rows. token: bytes of a token's keys and values. logits: bytes of a row's logits, written and read in
    float32. is_8_bit: both operands of the GEMMs are 8 bit.
    """

    weights: int
    multiplied: int
    head: int
    token: int
    logits: int
    is_8_bit: bool

    def floor_ms(self, rows: int, context: int = 512) -> float:
        """Milliseconds of a step of `rows` sequences of `context` tokens."""
        moved = rows * (context * self.token + self.logits) / BANDWIDTH
        products = 2 * rows * (self.multiplied + self.head) / self._peak
        return 1000 * (moved + max(self.weights / BANDWIDTH, products))

    def roof_ms(self, rows: int, context: float) -> float:
        """Milliseconds to read the matrices, the head, and keys and values of `rows` sequences of `context`
        tokens once, at READS.
        """
        return 1000 * (self.weights + rows * context * self.token) / READS

    def prompts_floor_ms(self, tokens: int) -> float:
        """Lower bound in milliseconds of a prefill of `tokens` tokens: the layers' GEMMs, without
        attention.
        """
        return 1000 * max(self.weights / BANDWIDTH, 2 * tokens * self.multiplied / self._peak)

    @property
    def _peak(self) -> float:
        return PEAK * (2 if self.is_8_bit else 1)


def traffic(model: ModelConfig, dtype: str, kv_cache_dtype: str = "auto", int8_head: bool = False) -> Traffic:
    """Return the traffic of a model on one GPU. dtype: of unquantised weights. Every layer is counted with
    the heads of the largest one.
    """
    head_name = "model.wte" if model.tied_head else "model.lm_head.weight"
    specs = models.family(model.family).weight_specs(model)
    layers = [spec for spec in specs if spec.layer is not None]
    head = next(spec for spec in specs if spec.name.startswith(head_name) and len(spec.shape) == 2)
    head_bytes = math.prod(head.shape) * (1 if int8_head else _BYTES[dtype])
    stored = sum(_bytes(spec, dtype) for spec in stored_specs(layers, model.quantization))
    multiplied = sum(math.prod(spec.shape) for spec in layers if len(spec.shape) == 2)
    keys = 2 * model.num_layers * model.num_kv_heads
    size = model.head_size * _BYTES[dtype] if kv_cache_dtype == "auto" else model.head_size + _SCALE_BYTES
    is_8_bit = model.quantization is not None and bool(model.quantization.activations)
    weights, in_head = stored + head_bytes, math.prod(head.shape)
    return Traffic(weights, multiplied, in_head, keys * size, 8 * model.vocab_size, is_8_bit)


def _bytes(spec: WeightSpec, dtype: str) -> int:
    return math.prod(spec.shape) * _BYTES[spec.dtype or dtype]


def of_result(result: dict[str, Any]) -> tuple[Traffic, list[dict[str, Any]]]:
    """The traffic of a result of `tridecode bench engine`, and its batches."""
    settings, found = result["settings"], result["results"]["tridecode"]
    job = Job(preset=settings["preset"], quantization=settings.get("quantization", ""))
    cache = found.get("kv_cache_dtype", "auto")
    return traffic(job.shape, found["dtype"], cache, found.get("int8_head", False)), found["batches"]


def row(run: Bars, result: dict[str, Any]) -> str:
    """Return a row of the table: figure, bar, floor and its share of the figure, at each number of
    sequences.
    """
    moved, batches = of_result(result)
    tokens = result["settings"]["prompt_tokens"]
    found = {batch["batch"]: batch for batch in batches}
    cells = [
        _cell(found[rows]["step_ms"], bar, moved.floor_ms(rows, tokens)) for rows, bar in zip(ROWS, run.steps)
    ]
    cells.append(_cell(found[64]["first_token_ms"], run.first, moved.prompts_floor_ms(64 * tokens)))
    return f"| {run.title} | " + " | ".join(cells) + " |"


def _cell(figure: float, bar: float | None, floor: float) -> str:
    wanted = "–" if bar is None else f"{bar:g}"
    return f"{figure:#.3g} / {wanted} / {floor:#.3g} ({floor / figure:.0%})".replace(". ", " ").replace(
        "%", " %"
    )


def table(runs: Iterable[Bars] = RUNS) -> str:
    """Markdown."""
    heads = "| reached / bar / floor (share) | " + " | ".join(map(str, ROWS)) + " | first token of 64 |"
    lines = [heads, "|---" * (len(ROWS) + 2) + "|"]
    for run in runs:
        lines.append(row(run, run.result()))
    return "\n".join(lines)


def main() -> None:
    print(table())


if __name__ == "__main__":
    main()
