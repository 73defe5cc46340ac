"""The commands `tridecode serve` and `tridecode tritonserver`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tridecode.backend.base.errors import ConfigError, TridecodeError

_checkpoint = partial(typer.Option, rich_help_panel="With a checkpoint")


def serve(
    repository: Annotated[
        str,
        typer.Argument(
            help="A model repository, or a checkpoint, which is converted on first use: a folder, a .gguf "
            "file or a hub id."
        ),
    ],
    triton_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- [FLAGS]", help="Flags for tritonserver, after --.")
    ] = None,
    quantize: Annotated[
        str | None,
        _checkpoint(metavar="FORMAT", help="int8, int4, fp8, w8a8-int8 ... as in `build-repo`."),
    ] = None,
    tp: Annotated[int, _checkpoint(min=1, help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, _checkpoint(min=1, help="Stages of layers, each with GPUs of its own.")] = 1,
    contract: Annotated[
        list[str] | None, _checkpoint(metavar="NAME[,NAME...]", help="Contracts to serve.")
    ] = None,
    for_clients: Annotated[
        str | None,
        _checkpoint(
            "--for", metavar="CLIENTS", help="fastertransformer, trtllm or vllm, as in `build-repo`."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        _checkpoint(
            help="Folder of converted repositories. Default: $TRIDECODE_CACHE, or ~/.cache/tridecode."
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = 8002,
    openai_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the OpenAI service. Default: config.pbtxt's, or none; 9000 with a checkpoint."
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Where to listen; 0.0.0.0: on every interface (read docs/design/security.md first)."
        ),
    ] = "127.0.0.1",
    metrics_address: Annotated[
        str | None, typer.Option(help="Address of /metrics, if different from --address.")
    ] = None,
    door_python: Annotated[
        str | None, typer.Option(help="Python for Triton's models; it needs numpy < 2.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds for open requests after SIGTERM.")] = 20.0,
    start_timeout_s: Annotated[
        float, typer.Option(help="Longest time of a start without progress, in seconds.")
    ] = 600.0,
    orphans: Annotated[
        str,
        typer.Option(
            metavar="idle|leave|SECONDS",
            help="When to restart tritonserver because of requests whose model died: idle (once no other "
            "request is open), after SECONDS at the latest, or never (leave).",
        ),
    ] = "3.5",
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="text|json",
            help="Format of our log lines; json: one object per line. Default: $TRIDECODE_LOG_FORMAT, "
            "or text.",
        ),
    ] = None,
    request_log: Annotated[
        bool | None,
        typer.Option(
            "--request-log/--no-request-log",
            help="Whether the log has one line per request (docs/reference/metrics.md). Default: yes, or as "
            "$TRIDECODE_REQUEST_LOG says.",
        ),
    ] = None,
    give_up_after: Annotated[
        str,
        typer.Option(
            metavar="DEATHS|never",
            help="Exit after this many deaths of tritonserver within 300 s. Until then restart it, "
            "after pauses of up to 15 s.",
        ),
    ] = "10",
    parent: Annotated[
        int | None, typer.Option(hidden=True, help="Process that started this one; end when it ends.")
    ] = None,
) -> None:
    """Run tritonserver on a model repository or a checkpoint.

    Models whose process dies are reloaded, and a tritonserver that dies is restarted; SIGTERM lets open
    requests finish. Wrong settings end it with exit code 2, every other failure with 1.

    \b
    Example:
      tridecode serve models --grpc-port 9001 -- --log-verbose=1
      tridecode serve bigscience/bloom-560m --quantize int8
    """
    from tridecode.backend.supervisor import processes
    from tridecode.tools.build_repo.cache import Conversion
    from tridecode.tools.build_repo.find_repository import find_repository, is_checkpoint
    from tridecode.tools.build_repo.options import names
    from tridecode.tools.serve import serving
    from tridecode.tools.serve.options import ServeOptions
    from tridecode.tools.serve.ports import usual_openai_port

    _choose_logs(log_format, request_log)
    if parent is not None:
        processes.die_with_parent()
        if os.getppid() != parent:
            raise typer.Exit(1)
    if openai_port is None and is_checkpoint(repository):
        openai_port = usual_openai_port(address)

    def run() -> int:
        conversion = Conversion(quantize, tp, tuple(names(contract)), for_clients, pp=pp)
        options = ServeOptions(
            find_repository(repository, conversion, cache),
            http_port, grpc_port, metrics_port, address, door_python, drain_s,
            tuple(triton_args or ()), metrics_address, start_timeout_s, orphans, give_up_after, openai_port,
        )  # fmt: skip
        if openai_port is not None:
            os.environ.update(options.openai_environment())
        return serving.serve(options)

    _exit_with(run)


def tritonserver(context: typer.Context) -> None:
    """Run tritonserver with NVIDIA's own flags.

    Unless flags say otherwise, it listens on the loopback interface and closes the APIs of model control,
    shared memory, logging and tracing. `tridecode serve` also restarts processes that die.

    \b
    Example:
      tridecode tritonserver --model-repository models --http-port 8000
    """
    from tridecode.tools.serve.tritonserver import run

    _exit_with(lambda: run(context.args))


def _choose_logs(chosen_format: str | None, request_log: bool | None) -> None:
    """Pass the options on to the doors and the engine, which inherit the environment. Raises ConfigError."""
    from tridecode.backend.base import log_format

    if chosen_format is not None:
        if chosen_format not in log_format.FORMATS:
            raise ConfigError(f"--log-format is {chosen_format!r}; wanted {' or '.join(log_format.FORMATS)}")
        os.environ[log_format.FORMAT_VARIABLE] = chosen_format
    if request_log is not None:
        os.environ[log_format.REQUESTS_VARIABLE] = "on" if request_log else "off"


def _exit_with(run: Callable[[], int]) -> NoReturn:
    """Log to stderr, run, and exit with its return code; with 1 after any error but a ConfigError."""
    import logging  # here: no other command needs it, and --help must be quick

    from tridecode.backend.base import log_format

    log_format.configure("serve")
    try:
        code = run()
    except ConfigError:
        raise
    except TridecodeError as error:
        logging.getLogger("tridecode.serve").error("%s", error)
        code = 1
    raise typer.Exit(code)
