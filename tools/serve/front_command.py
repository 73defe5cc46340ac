"""The command `tridecode front`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError


def front(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: on every interface, with an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one, which the log names.")] = 9000,
    workers: Annotated[int, typer.Option(help="Worker processes that share the port.")] = 1,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model; repeatable. Default: its own."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template that replaces the checkpoint's.")
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Format of tool calls: hermes, llama3_json or mistral. Default: the template's."),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin whose pages may send requests, may be repeated; *: all."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="TRIDECODE_API_KEY", help="Key that requests must carry, may be repeated."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of SHA-256 digests of keys; it is read again when it changes."),
    ] = None,
    manage_adapters: Annotated[
        bool, typer.Option(help="Let requests add and remove LoRA adapters from folders of this machine.")
    ] = False,
    max_connections: Annotated[
        int, typer.Option(help="Connections per worker; further ones are refused with 503.")
    ] = 10_000,
    batch_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for files and batches, which /v1/files and /v1/batches need."
        ),
    ] = None,
    batch_dir_bytes: Annotated[
        int, typer.Option(help="Bytes that all files in it may have, results included.")
    ] = 10 << 30,
    batch_max_files: Annotated[int, typer.Option(help="Files that it may have.")] = 1000,
    triton: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...",
            help="gRPC ports of Triton servers that serve the model, instead of an engine of this machine.",
        ),
    ] = "",
    triton_tls: Annotated[bool, typer.Option(help="Reach the Triton servers by TLS.")] = False,
    triton_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities that their certificates must have, in PEM. Default: gRPC's own list."),
    ] = None,
    triton_cert: Annotated[
        Path | None, typer.Option(help="This service's certificate for those servers, in PEM.")
    ] = None,
    triton_key: Annotated[Path | None, typer.Option(help="Key of --triton-cert.")] = None,
    engine_model: Annotated[str, typer.Option(help="Model whose config.pbtxt configures the engine.")] = (
        "fastertransformer"
    ),
) -> None:
    """Serve a model repository through OpenAI's API.

    If a server of the repository runs, it uses that server's engine; otherwise it starts one, without Triton.
    With --triton it uses the engines of other servers.

    \b
    Example:
      tridecode front models --port 9000
      tridecode front models --triton gpu1:8001,gpu2:8001
    """
    try:
        from tridecode.backend.front.__main__ import FrontArguments, run
    except ImportError as error:
        raise ConfigError(f"{error}; wanted: pip install 'tridecode[front]'") from None
    os.environ.setdefault("TRIDECODE_ENGINE_PYTHON", sys.executable)  # of an engine that it starts
    arguments = FrontArguments(
        repository=repository,
        host=host,
        port=port,
        workers=workers,
        served_model_name=tuple(served_model_name or ()),
        chat_template="" if chat_template is None else str(chat_template),
        tool_call_parser=tool_call_parser or "",
        cors=tuple(cors or ()),
        api_key=tuple(api_key or ()),
        api_key_file="" if api_key_file is None else str(api_key_file),
        engine_model=engine_model,
        manage_adapters=manage_adapters,
        max_connections=max_connections,
        batch_dir="" if batch_dir is None else str(batch_dir),
        batch_dir_bytes=batch_dir_bytes,
        batch_max_files=batch_max_files,
        triton=triton,
        triton_tls=triton_tls,
        triton_ca="" if triton_ca is None else str(triton_ca),
        triton_cert="" if triton_cert is None else str(triton_cert),
        triton_key="" if triton_key is None else str(triton_key),
    )
    raise typer.Exit(run(arguments))
