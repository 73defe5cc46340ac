"""The command `tridecode train-draft`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError

#: kinds of drafters, with their usual learning rates
RATES = {"heads": 1e-3, "model": 1e-3, "glide": 1e-3}

_texts = partial(typer.Option, rich_help_panel="Texts")
_training = partial(typer.Option, rich_help_panel="Training")


def train_draft(
    model: Annotated[
        str,
        typer.Option(help="Target: a repository that build-repo made, a weight directory, or a checkpoint."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    kind: Annotated[
        str,
        typer.Option(
            help="heads: all drafts in one pass; model: a draft model; glide: a layer that attends to the "
            "target's own cache."
        ),
    ] = "heads",
    depth: Annotated[int, typer.Option(min=1, max=15, help="Drafts per step.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, max=4096, help="CPU threads; 0: one per processor, as torch chooses.")
    ] = 0,
    tokens: Annotated[
        int | None,
        _texts(
            min=256,
            max=1_000_000_000,
            help="Tokens of all texts, about; default: 500,000 on a GPU, 100,000 on a CPU.",
        ),
    ] = None,
    text_tokens: Annotated[int, _texts(min=16, max=65_536, help="Tokens of an answer, at most.")] = 256,
    prompts: Annotated[
        Path | None,
        _texts(
            help='Prompts: a text file, one per line, or .jsonl with strings, {"prompt": …} or lists of ids; '
            "default: beginnings that the model draws itself."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, _texts(min=1, max=65_536, help="A longer prompt of --prompts is cut to its end.")
    ] = 256,
    temperature: Annotated[
        float,
        _texts(min=0.0, max=2.0, help="Half of the texts are drawn at it, half greedily; 0: all greedily."),
    ] = 1.0,
    held_back: Annotated[
        int, _texts(min=1, max=10_000, help="Prompts for the figures, which are not trained on.")
    ] = 32,
    width: Annotated[
        int | None,
        _training(
            min=8,
            max=65_536,
            help="Size of the inner layer; default: six times the hidden size, at most 8192; glide: of the "
            "layer's MLP; default: that of the target's.",
        ),
    ] = None,
    epochs: Annotated[int, _training(min=1, max=1000, help="Passes over the texts.")] = 6,
    batch: Annotated[int, _training(min=1, max=65_536, help="Positions of a training step.")] = 1024,
    rate: Annotated[
        float | None,
        _training(min=1e-6, max=1.0, help="Highest learning rate; default: 0.001."),
    ] = None,
    layers: Annotated[
        int, _training(min=1, max=1024, help="model: layers of the target that it keeps and trains.")
    ] = 2,
    seed: Annotated[int, _training(min=0, max=2**31 - 1, help="The same seed gives the same drafter.")] = 0,
) -> None:
    """Train a drafter on texts that its target writes.

    Prints the tokens per step that its drafts give on held-back prompts, answered greedily.

    \b
    Example:
      tridecode train-draft --model models --output heads
    """
    kinds = list(RATES)
    if kind not in kinds:
        raise ConfigError(f"--kind {kind}: wanted {', '.join(kinds[:-1])} or {kinds[-1]}")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: wanted auto, cpu or cuda")
    if output.exists():
        raise ConfigError(f"{output} exists; wanted a new folder (--output)")
    if prompts is not None and not prompts.is_file():
        raise ConfigError(f"{prompts}: no such file (--prompts)")

    from rich.console import Console

    from tridecode.tools.train_draft.run import Job  # imports torch
    from tridecode.tools.train_draft.run import train_draft as train
    from tridecode.tools.train_draft.training import Plan

    console = Console(highlight=False, soft_wrap=True)
    plan = Plan(depth, width, epochs, batch, rate or RATES[kind], seed)
    job = Job(
        model, output, kind, plan, layers, tokens or 0, text_tokens, held_back, temperature, prompts,
        prompt_tokens, device, threads,
    )  # fmt: skip
    info = train(job, console)
    for number, found in enumerate(info.tokens_per_step, 1):
        console.print(f"{number:2} drafts: {found:.3f} tokens per step")
    console.print(f"wrote {output}")
