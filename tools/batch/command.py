"""The command `tridecode batch`."""

from pathlib import Path
from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.priority import LOWEST_PRIORITY


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File of requests, one JSON object a line.")],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT", help="File of answers; an earlier run's is continued.")
    ],
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Running service with OpenAI's API, as http://localhost:9000."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Without a server: a model repository, or a checkpoint, which is converted on first use: a "
            "folder, a .gguf file or a hub id."
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(help="File of lines without an answer. Default: OUT's name with .errors.jsonl."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Requests at a time. Default: a quarter more than the engine has sequences; 64 if the "
            "service does not say.",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=-(2**31),
            max=2**31 - 1,
            help="Priority of lines that set none; smaller is sooner. Default: the lowest. Only Tridecode's "
            "service gets it.",
            show_default=False,
        ),
    ] = LOWEST_PRIORITY,
    api_key: Annotated[
        str,
        typer.Option(envvar="TRIDECODE_API_KEY", help="Key of the service.", show_default=False),
    ] = "",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="With --model: name that lines give it, may be repeated. Default: its own."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="With a checkpoint: int8, int4, fp8 ... as in `build-repo`."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With a checkpoint: GPUs that share each layer.")] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of converted checkpoints. Default: $TRIDECODE_CACHE, or ~/.cache/tridecode."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds that one request may take before it is sent again.")
    ] = 3600.0,
    patience_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that the service may be away, or too busy for one line."),
    ] = 600.0,
    start_timeout_s: Annotated[
        float, typer.Option(min=1.0, help="With --model: seconds until the engine must be ready.")
    ] = 900.0,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Answers are written in the order in which they come, each with its custom_id. Lines without an answer go
    to the file of errors. The same command continues after an interruption: lines that the two files have are
    not sent again.

    Exit code 0: every line has an answer; 1: some have an error; 2: a wrong argument, or a service that stays
    away.

    \b
    Example:
      tridecode batch requests.jsonl answers.jsonl --url http://localhost:9000
      tridecode batch requests.jsonl answers.jsonl --model models
    """
    try:
        from tridecode.tools.batch.batch import BatchOptions, run_batch
    except ImportError as error:
        raise ConfigError(f"{error}; wanted: pip install 'tridecode[front]'") from None
    from tridecode.tools.build_repo.cache import Conversion

    options = BatchOptions(
        source=source,
        answers=answers,
        errors=errors or answers.parent / f"{answers.stem}.errors.jsonl",
        url=url or "",
        model=model or "",
        concurrency=concurrency,
        priority=priority,
        api_key=api_key,
        served_model_name=tuple(served_model_name or ()),
        conversion=Conversion(quantize, tp),
        cache=cache,
        timeout_s=timeout_s,
        patience_s=patience_s,
        start_timeout_s=start_timeout_s,
    )
    raise typer.Exit(run_batch(options))
