"""`tridecode bench agree`: one checkpoint's greedy tokens on the CPU and on a GPU, in each precision.

The engine on the CPU in fp32 is the reference. Each engine answers the prompts in one batch, then each alone,
then in one batch again as in a server: with decode graphs, if its device supports them. Two answers are
compared up to the first token that differs, because later tokens have different prefixes. The files keep the
checkpoint's own dtype, so bf16 also rounds the weights of a checkpoint in fp16.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.tokenizers.files import load_tokenizer
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.demo import packaged_model
from tridecode.tools.progress import spinner

#: several lengths and kinds; an instruction-tuned model answers some and continues others
PROMPTS = (
    "What is gravity? Answer in three sentences.",
    "The capital of France is",
    "Once upon a time, in a village at the edge of a dark forest, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "List five animals that live in the sea:\n1.",
    "Water boils at 100 degrees Celsius because",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "In 1969, Neil Armstrong became the first",
    "The",
    "Translate into French: The house is small, but it has a large garden.",
    "Photosynthesis is the process by which plants turn sunlight, water and carbon dioxide into",
    "Q: A train travels 60 miles in 1.5 hours. What is its average speed?\nA:",
    "The three primary colours are red, yellow and",
    "She opened the letter, read it twice, put it back into its envelope and said to her brother:",
    "To make a simple tomato soup, first chop two onions and three cloves of garlic. Then heat some oil in a "
    "large pot, add the onions, and cook them slowly until they are soft. After that,",
    "Summarise in one sentence: The committee met on Tuesday to discuss the new bridge. Most members agreed "
    "that the old one was unsafe, but nobody wanted to say how a new one should be paid for, and after three "
    "hours the meeting ended without a decision.",
)


@dataclass(frozen=True)
class Side:
    """One engine. device: cpu or cuda."""

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype}"


@dataclass(frozen=True)
class Difference:
    """The first step at which two answers to a prompt differ.

    tokens: that of the first answer and that of the second. logits: of these two tokens in the first answer,
    then in the second; gaps: between the two best logits of each; error: the largest difference of any logit.
    None if the second answer's logits were not kept. unit: one unit of rounding of the coarser dtype at the
    largest logit's size.
    """

    prompt: int
    step: int
    tokens: tuple[int, int]
    logits: tuple[list[float], list[float] | None]
    gaps: tuple[float, float | None]
    error: float | None
    unit: float


@dataclass(frozen=True)
class Agreement:
    """Comparison of two engines' answers, or of one engine's answers in two modes.

    identical: prompts whose tokens are all the same. shortest: tokens before the earliest difference. error,
    error_units: the largest of any logit up to and including the first differences; in units of rounding of
    its step. None if the second answers' logits were not kept.
    """

    prompts: int
    identical: int
    shortest: int
    error: float | None
    error_units: float | None
    differences: list[Difference]


def run_agree(model: str | None, tokens: int, prompts: int, device: str, output: Path) -> None:
    """Convert, generate everywhere, print, and write agree-<model>.json.

    model: a Hugging Face directory or .gguf file; None: SmolLM2-135M-Instruct. prompts: number of
    PROMPTS. device: cpu compares fp32 with bf16; auto does so where there is no GPU. Raises TridecodeError.
    """
    if not 1 <= prompts <= len(PROMPTS):
        raise ConfigError(f"--prompts is {prompts}; there are {len(PROMPTS)}")
    checkpoint = open_checkpoint(model or packaged_model())
    with tempfile.TemporaryDirectory() as root, spinner(f"{checkpoint.name}: converting") as say:
        weights = Path(root) / "weights"
        planned = plan_conversion(checkpoint)
        planned.write(weights)
        tokenizer = Tokenizer.from_str(load_tokenizer(checkpoint).backend_tokenizer.to_str())
        ids = prompt_ids(tokenizer, planned.config, prompts, tokens)
        results = measure_agreement(weights, choose_sides(device), ids, tokens, say)
    results["texts"] = _texts(results, tokenizer)
    _show(f"{checkpoint.name} {planned.config.weight_dtype}", results, tokens)
    settings = {
        "model": checkpoint.name,
        "weight_dtype": planned.config.weight_dtype,
        "tokens": tokens,
        "prompts": prompts,
        "device": device,
    }
    path = write_report(output / f"agree-{checkpoint.name}.json", "agree", settings, results)
    Console().print(f"wrote {path}", highlight=False)


def choose_sides(device: str) -> list[Side]:
    """The reference engine, and the engines that are compared with it."""
    if choose_device(EngineConfig(device=device)).type == "cpu":
        return [Side("cpu", "fp32"), Side("cpu", "bf16")]
    return [Side("cpu", "fp32"), *(Side("cuda", dtype) for dtype in ("fp32", "fp16", "bf16"))]


def prompt_ids(tokenizer: Tokenizer, model: ModelConfig, count: int, new_tokens: int) -> list[list[int]]:
    """The first prompts' ids, cut so that the new tokens fit into the model's positions."""
    room = model.max_positions - new_tokens
    if room < 1:
        raise ConfigError(f"--tokens is {new_tokens}; {model.model_name} has {model.max_positions} positions")
    return [
        [token for token in tokenizer.encode(text).ids if token < model.vocab_size][:room]
        for text in PROMPTS[:count]
    ]


# ---------------------------------------------------------------- generating


@dataclass(frozen=True)
class Answers:
    """One engine's generations, prompt by prompt; `served` has no logits."""

    together: list[Generation]
    alone: list[Generation]
    served: list[Generation]


def answer(weights: Path, side: Side, prompts: list[list[int]], new_tokens: int) -> Answers:
    """Greedy answers of exactly new_tokens: all prompts at once, each alone, and all as they are served."""
    config = EngineConfig(
        data_type=side.dtype,
        device=side.device,
        max_sequences=len(prompts),
        max_sequence_tokens=max(map(len, prompts)) + new_tokens,
    )
    params = SamplingParams(max_tokens=new_tokens)
    offline = OfflineEngine.load(weights, config, keep_logits=True)
    with torch.inference_mode():
        together = offline.generate(prompts, params)
        alone = [offline.generate([prompt], params)[0] for prompt in prompts]
        offline.engine.on_logits = None  # decode graphs run only without this callback
        served = offline.generate(prompts, params)
    return Answers(together, alone, served)


def measure_agreement(
    weights: Path,
    sides: Sequence[Side],
    prompts: list[list[int]],
    new_tokens: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return {"reference": the first side, "engines": {side: {"reference", "alone", "served"}}}.

    Each value is an Agreement, as a dict: an engine's batched answers compared with the reference's, with its
    answers to single prompts, and with its answers as served.
    """
    engines: dict[str, Any] = {}
    reference: list[Generation] = []
    for side in sides:
        say(f"generating: {side}")
        found = answer(weights, side, prompts, new_tokens)
        compared = {
            "alone": compare(found.together, found.alone, side.dtype),
            "served": compare(found.together, found.served, side.dtype),
        }
        if reference:
            compared = {"reference": compare(reference, found.together, side.dtype), **compared}
        engines[str(side)] = {name: asdict(agreement) for name, agreement in compared.items()}
        reference = reference or found.together
        del found
        _free()
    return {"reference": str(sides[0]), "engines": engines}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- comparing


def compare(ones: Sequence[Generation], others: Sequence[Generation], dtype: str) -> Agreement:
    """dtype: the coarser of the two engines'. Generations without logits are compared by their tokens."""
    eps = torch.finfo(TORCH_DTYPES[dtype]).eps
    pairs = list(zip(ones, others, strict=True))
    found = [first_difference(number, *pair, eps) for number, pair in enumerate(pairs)]
    errors = [_errors(*pair, eps) for pair in pairs if pair[1].logits]
    differences = [one for one in found if one is not None]
    lengths = [len(one.tokens) for one in ones] + [difference.step for difference in differences]
    return Agreement(
        prompts=len(pairs),
        identical=len(pairs) - len(differences),
        shortest=min(lengths),
        error=max((error for error, _ in errors), default=None),
        error_units=max((units for _, units in errors), default=None),
        differences=differences,
    )


def _steps(one: Generation, other: Generation) -> tuple[int, bool]:
    """The number of steps with the same prefix, and whether the last of them chose different tokens."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    differing = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
    return (len(one.tokens), False) if differing is None else (differing + 1, True)


def _errors(one: Generation, other: Generation, eps: float) -> tuple[float, float]:
    """The largest difference of any logit over the common steps, and in units of rounding of its step."""
    steps, _ = _steps(one, other)
    errors = [float(np.abs(a - b).max()) for a, b in zip(one.logits[:steps], other.logits[:steps])]
    units = [error / _unit(logits, eps) for error, logits in zip(errors, one.logits)]
    return max(errors), round(max(units), 2)


def _unit(logits: np.ndarray, eps: float) -> float:
    return eps * float(np.abs(logits).max())


def first_difference(number: int, one: Generation, other: Generation, eps: float) -> Difference | None:
    """Find the first token at which the answers to prompt `number` differ, or None. eps: of the coarser
    dtype.
    """
    steps, differs = _steps(one, other)
    if not differs:
        return None
    step = steps - 1
    tokens = (one.tokens[step], other.tokens[step])
    mine = one.logits[step]
    theirs = other.logits[step] if other.logits else None
    return Difference(
        prompt=number,
        step=step,
        tokens=tokens,
        logits=(_of(mine, tokens), None if theirs is None else _of(theirs, tokens)),
        gaps=(_gap(mine), None if theirs is None else _gap(theirs)),
        error=None if theirs is None else float(np.abs(mine - theirs).max()),
        unit=_unit(mine, eps),
    )


def _of(logits: np.ndarray, tokens: tuple[int, int]) -> list[float]:
    return [float(logits[token]) for token in tokens]


def _gap(logits: np.ndarray) -> float:
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


# ---------------------------------------------------------------- printing


def _texts(results: dict[str, Any], tokenizer: Tokenizer) -> dict[int, str]:
    """The text of each token that a difference names."""
    found = {
        token
        for engine in results["engines"].values()
        for agreement in engine.values()
        for difference in agreement["differences"]
        for token in difference["tokens"]
    }
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(found)}


def _show(title: str, results: dict[str, Any], tokens: int) -> None:
    console = Console()
    rows = [
        [name, against, *_summary(found)]
        for name, engine in results["engines"].items()
        for against, found in engine.items()
    ]
    columns = ["", "against", f"same {tokens} tokens", "same for", "logit error", "in units"]
    console.print(table(f"{title}; the reference is {results['reference']}", columns, rows))
    differences = [
        [f"{name}, {against}", *_line(difference, results["texts"])]
        for name, engine in results["engines"].items()
        for against, found in engine.items()
        for difference in found["differences"]
    ]
    columns = ["", "prompt", "step", "tokens", "logits", "other's", "gaps", "error"]
    if differences:
        console.print(table("first differences; gaps and errors in units of rounding", columns, differences))


def _summary(found: dict[str, Any]) -> list[Any]:
    same = f"{found['identical']} of {found['prompts']}"
    return [same, found["shortest"], found["error"], found["error_units"]]


def _line(difference: dict[str, Any], texts: dict[int, str]) -> list[Any]:
    """Two lines per cell: the two tokens, their logits in both answers, and both answers' gaps."""
    unit = difference["unit"]
    return [
        difference["prompt"],
        difference["step"],
        "\n".join(escape(repr(texts[token])) for token in difference["tokens"]),
        *("\n".join(f"{logit:.5g}" for logit in pair or ()) or None for pair in difference["logits"]),
        "\n".join(f"{gap / unit:.3g}" for gap in difference["gaps"] if gap is not None),
        None if difference["error"] is None else difference["error"] / unit,
    ]
