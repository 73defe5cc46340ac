"""The command `tridecode bench speculate`."""

from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.options import (
    RESULTS,
    CacheDtype,
    Device,
    Dtype,
    Int8Head,
    Model,
    Output,
    Preset,
    Quantization,
)


def speculate(
    preset: Preset = "smollm2-135m",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batches: Annotated[str, typer.Option(help="Numbers of sequences, separated by commas.")] = "1,8,64",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=33, help="New tokens of each sequence.")] = 129,
    drafts: Annotated[int, typer.Option(min=1, max=7, help="Drafts of a forced step.")] = 4,
    right: Annotated[int, typer.Option(min=0, max=7, help="Drafts of it that are accepted.")] = 2,
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Draft model: a preset with --preset, a weight directory or checkpoint with --model; "
            "default: lookup.",
        ),
    ] = "",
    heads: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="One-pass heads: a folder of train-draft with --model, or random with --preset.",
        ),
    ] = "",
    glide: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="GLIDE layer: a folder of train-draft with --model, or random with --preset.",
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turns.")] = 3,
    kv_cache_dtype: CacheDtype = "auto",
    quantization: Quantization = None,
    int8_head: Int8Head = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Measure speculative decoding.

    Alternates plain decoding, a forced number of accepted drafts, sampled text without repetitions and, with
    a draft model, heads or a GLIDE layer, their own drafts on one engine. Prints milliseconds per step,
    tokens per second, and their ratios to plain decoding.

    \b
    Example:
      tridecode bench speculate --preset toy --batches 1,4 --output-tokens 33
    """
    from tridecode.backend.weights.draft_files import TRAINED
    from tridecode.tools.bench.jobs import make_job
    from tridecode.tools.bench.speculate.run import SpeculatePlan, batches_of, run_speculate

    sources = {"heads": heads, "glide": glide, "draft": draft}
    given = [kind for kind, source in sources.items() if source]
    kind = given[0] if given else "lookup"
    source = sources.get(kind, "")
    if len(given) > 1 or (kind in TRAINED and (source == "random") == bool(model)):
        raise ConfigError(
            f"--{kind} {source}: wanted random with --preset, a folder with --model, and no other drafter"
        )
    plan = SpeculatePlan(batches_of(batches), drafts, right, repeats)
    job = make_job(
        preset, model, dtype, device=device, batches=(max(64, *plan.batches),), prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, kv_cache_dtype=kv_cache_dtype, quantization=quantization or "",
        int8_head=int8_head, seed=seed,
        speculation=kind, draft="" if source == "random" else source,
    )  # fmt: skip
    run_speculate(plan, job, output)
