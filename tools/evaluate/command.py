"""The command `tridecode evaluate-lambada`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError

TOLERANCE = 0.1  # points of accuracy


def evaluate_lambada(
    data: Annotated[Path, typer.Option(help="lambada_test.jsonl; see docs/guides/lambada.md.")],
    url: Annotated[
        str, typer.Option("--url", "-u", help="host[:port] of the server's gRPC; port 8001.")
    ] = "localhost:8001",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Model of token ids or of text; default: fastertransformer."),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(help="Run this repository's engine here, on one rank, instead of a server."),
    ] = None,
    definition: Annotated[str, typer.Option(help="last-token, last-word or both.")] = "both",
    reference: Annotated[
        str | None,
        typer.Option(help="Also run this checkpoint in transformers: directory, hub id or .gguf."),
    ] = None,
    reference_dtype: Annotated[
        str,
        typer.Option(help="dtype of transformers' weights: fp32, fp16 or bf16. A CPU computes in float32."),
    ] = "fp16",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Repository or tokenizer folder; default: the one served on this machine."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many items.")] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=1024, help="Requests in flight.")
    ] = 16,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Points by which the two accuracies may differ.")
    ] = TOLERANCE,
    timeout_s: Annotated[
        float | None, typer.Option(help="Give up after this many seconds without a response.")
    ] = 600.0,
    output: Annotated[Path | None, typer.Option(help="Write the result, item by item, as JSON.")] = None,
) -> None:
    """Measure accuracy on LAMBADA, with or without a server.

    With --reference, transformers answers the same questions, and the exit code is 1 if the two accuracies
    differ by more than --tolerance points in a definition.

    \b
    Example:
      tridecode evaluate-lambada --data lambada_test.jsonl --reference bigscience/bloom-560m
      tridecode evaluate-lambada --data lambada_test.jsonl --repository models
    """
    from tridecode.backend.configuration.model_config import DTYPES
    from tridecode.converters.model_source import find_model
    from tridecode.tools.evaluate.lambada import DEFINITIONS, read_items

    if definition != "both" and definition not in DEFINITIONS:
        raise ConfigError(f"--definition {definition}: wanted {', '.join(DEFINITIONS)} or both")
    if reference_dtype not in DTYPES:
        raise ConfigError(f"--reference-dtype {reference_dtype}: wanted {', '.join(DTYPES)}")
    read_items(data, limit)
    if reference is not None:
        find_model(reference)  # the report has the name as given

    from rich.console import Console

    from tridecode.tools.evaluate.run import evaluate  # imports torch

    result = evaluate(
        data,
        url,
        model,
        list(DEFINITIONS) if definition == "both" else [definition],
        reference=reference,
        reference_dtype=reference_dtype,
        tokenizer=tokenizer,
        limit=limit,
        concurrency=concurrency,
        timeout_s=timeout_s,
        repository=repository,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(result.table())
    if output is not None:
        output.write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
    apart = result.apart(tolerance)
    for text in apart:
        console.print(text, style="red")
    if apart:
        raise typer.Exit(1)
