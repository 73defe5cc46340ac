"""The command `tridecode bench front`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from tridecode.tools.bench.options import RESULTS, Output, numbers


def front(
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,64,256",
    idle: Annotated[int, typer.Option(min=0, help="Open streams that get one token and no more.")] = 5000,
    workers: Annotated[int, typer.Option(min=1, help="Also measure this many workers.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each measurement, about.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repeat everything; medians are reported.")] = 3,
    beside: Annotated[
        Optional[Path],
        typer.Option(
            exists=True, file_okay=False, help="Folder with another tree's package tridecode, for turns."
        ),
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Measure the OpenAI front alone: a fake engine behind it, a client in C before it.

    Processor time of the front's workers for each chunk, token and request; rates, memory, and how soon the
    engine hears that a client has left. Needs a C compiler.

    \b
    Example:
      tridecode bench front --streams 64 --rounds 1
    """
    from tridecode.tools.bench.front.run import FrontPlan, run_front

    run_front(FrontPlan(numbers(streams), idle, workers, seconds, rounds, beside), output)
