"""The command `tridecode doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    repository: Annotated[
        Path | None, typer.Argument(help="A model repository; without it, only the machine.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read every weight file, not a sample, and compare its SHA-256.")
    ] = False,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU of a planned machine, e.g. 80GiB.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=1024, help="GPUs of a planned machine.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find faults of this machine and of a model repository.

    Reads only. Says what to change, and what fits: bytes of each rank, sequences at several lengths. Exit
    code: 0 without problems (warnings allowed), 1 with problems.

    \b
    Example:
      tridecode doctor models
      tridecode doctor models --gpu-memory 80GiB --gpus 2
    """
    from tridecode.tools.byte_sizes import parse_bytes

    memory = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")

    from rich.console import Console

    from tridecode.tools.doctor.diagnosis import diagnose  # imports torch
    from tridecode.tools.doctor.report import print_report

    found = diagnose(repository, full=full, gpu_memory=memory, gpus=gpus)
    if json_:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        print_report(found, Console(highlight=False))
    if found.problems:
        raise typer.Exit(1)
