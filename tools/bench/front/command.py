"""The command `tridecode bench front`."""

from pathlib import Path
from typing import Annotated

import typer

from tridecode.tools.bench.options import RESULTS, Output, Repeats, numbers


def front(
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,64,256",
    idle: Annotated[int, typer.Option(min=0, help="Open streams that get one token and no more.")] = 5000,
    workers: Annotated[int, typer.Option(min=1, help="Also measure this many workers.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each measurement, about.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repeat everything; medians are reported.")] = 3,
    beside: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder with another tree's package tridecode, for turns."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Compare streams through the front with an engine of this shape alone, random weights."
        ),
    ] = None,
    repeats: Repeats = 3,
    output: Output = RESULTS,
) -> None:
    """Measure the OpenAI front: a fake engine (--preset: a real one) behind it, a client in C before it.

    Processor time of the front's workers for each chunk, token and request; rates, memory, and how soon the
    engine hears that a client has left. Needs a C compiler.

    \b
    Example:
      tridecode bench front --streams 64 --rounds 1
      tridecode bench front --preset llama-3-8b
    """
    if preset is not None:
        from tridecode.tools.bench.front.served import run_served
        from tridecode.tools.bench.jobs import make_job

        run_served(make_job(preset, None, None, batches=numbers(streams), repeats=repeats), output)
        return
    from tridecode.tools.bench.front.run import FrontPlan, run_front

    run_front(FrontPlan(numbers(streams), idle, workers, seconds, rounds, beside), output)


def batches(
    preset: Annotated[
        str | None,
        typer.Option(help="Engine of this shape with random weights; default: a fake engine."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences of the engine.")] = 64,
    lines: Annotated[int, typer.Option(min=100, help="Lines of the batch.")] = 10_000,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests of clients per second.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each phase.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repeat everything.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    output: Output = RESULTS,
) -> None:
    """Measure clients and a batch of /v1/batches: each alone, then both.

    \b
    Example:
      tridecode bench batches --seconds 5 --lines 3000
      tridecode bench batches --preset llama-3-8b
    """
    from tridecode.tools.bench.front.batches import BatchPlan, run_batches
    from tridecode.tools.bench.jobs import make_job

    plan = BatchPlan(lines, rate, seconds, rounds, prompt_tokens, output_tokens, slots)
    sizes = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "batches": (slots,)}
    run_batches(plan, None if preset is None else make_job(preset, None, None, **sizes), output)
