"""The commands `tridecode cache list` and `tridecode cache rm`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tridecode.backend.base.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and remove converted checkpoints.",
)
_Folder = Annotated[
    Path | None,
    typer.Option("--cache", help="Folder of repositories. Default: $TRIDECODE_CACHE, or ~/.cache/tridecode."),
]


@app.command("list")
def list_entries(cache: _Folder = None) -> None:
    """List the cached repositories, the one used last first.

    \b
    Example:
      tridecode cache list
    """
    from tridecode.tools.build_repo.cache import RepositoryCache

    repositories = RepositoryCache(cache)
    entries = repositories.entries()
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        size, made_from = f"{entry.bytes:>15,} bytes", f"{entry.source} {entry.options}"
        typer.echo(f"{entry.path.name}  {size}  used {used}  {made_from}".rstrip())
    total = sum(entry.bytes for entry in entries)
    typer.echo(f"{repositories.folder}: {len(entries)} repositories, {total:,} bytes")


@app.command("rm")
def remove_entries(
    names: Annotated[list[str] | None, typer.Argument(help="Names as `cache list` shows them.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Remove all repositories that no process uses.")
    ] = False,
    cache: _Folder = None,
) -> None:
    """Remove cached repositories. A repository that a running server uses is kept and reported.

    \b
    Example:
      tridecode cache rm --all
    """
    from tridecode.tools.build_repo.cache import RepositoryCache

    if bool(names) == every:
        raise ConfigError("wanted the names of repositories, or --all")
    repositories = RepositoryCache(cache)
    entries = {entry.path.name: entry for entry in repositories.entries()}
    unknown = [name for name in names or [] if name not in entries]
    if unknown:
        raise ConfigError(f"{repositories.folder} has no repository {unknown[0]!r}; see tridecode cache list")
    freed = used = 0
    for name in names or list(entries):
        if repositories.remove(entries[name].path):
            freed += entries[name].bytes
        else:
            used += 1
            typer.echo(f"{name} is in use; it stays", err=True)
    typer.echo(f"removed {freed:,} bytes")
    if used and not every:
        raise typer.Exit(1)
