"""The commands `tridecode adapters list`, `add` and `remove`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="LoRA adapters that a repository serves by name.")
_Repository = Annotated[Path, typer.Argument(help="A model repository.")]
_Name = Annotated[str, typer.Argument(help="Name that requests send as lora_name.")]


def _check(repository: Path) -> None:
    """ConfigError for what is not a repository."""
    from tridecode.backend.configuration.engine_config_file import read_engine_parameters
    from tridecode.model_repo_templates.served import ENGINE_MODEL

    read_engine_parameters(str(repository / ENGINE_MODEL))


@app.command("list")
def list_adapters(repository: _Repository) -> None:
    """List the adapters, with the reason if one cannot be served.

    Exit code: 1 if an adapter cannot be served.

    \b
    Example:
      tridecode adapters list models
    """
    _check(repository)
    from tridecode.tools.adapters.folder import read_adapters  # imports torch

    found = read_adapters(repository)
    for adapter in found:
        colour = typer.colors.RED if adapter.fault else None
        typer.secho(str(adapter), fg=colour)
    if not found:
        typer.echo(f"{repository} has no adapters; add one with tridecode adapters add")
    if any(adapter.fault for adapter in found):
        raise typer.Exit(1)


@app.command()
def add(
    repository: _Repository,
    name: _Name,
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder, as PEFT saves it.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the adapter of this name; a server reads it again.")
    ] = False,
) -> None:
    """Check an adapter against the model and add it; a running server serves it at once.

    \b
    Example:
      tridecode adapters add models french ./bloom-french-lora
      tridecode generate --prompt "Bonjour" --lora-name french
    """
    _check(repository)
    from tridecode.tools.adapters.folder import add_adapter  # imports torch

    typer.echo(f"added {add_adapter(repository, name, adapter, overwrite)}")


@app.command()
def remove(repository: _Repository, name: _Name) -> None:
    """Remove an adapter; running requests with it are not affected.

    \b
    Example:
      tridecode adapters remove models french
    """
    _check(repository)
    from tridecode.tools.adapters.folder import remove_adapter  # imports torch

    remove_adapter(repository, name)
    typer.echo(f"removed {name}")
