"""`tridecode`: registers the commands. Heavy modules are imported by the command that needs them.

Exit codes: 0 success; 1 a command that found faults (`check`, `doctor`, `bench load`, `serve`,
`evaluate-lambada`, `batch`), or a defect with its
traceback; 2 a wrong argument or environment, one line on stderr; 130 Ctrl-C; 141 the reader of stdout has
closed it.
"""

import errno
import io
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.base.threads import spin_briefly
from tridecode.tools.adapters.commands import app as adapters_app
from tridecode.tools.batch.command import batch
from tridecode.tools.bench.command import app as bench_app
from tridecode.tools.build_repo.cache_commands import app as cache_app
from tridecode.tools.build_repo.commands import build_repo, check
from tridecode.tools.chat.command import chat
from tridecode.tools.client.commands import demo, generate, send_request
from tridecode.tools.doctor.command import doctor
from tridecode.tools.evaluate.command import evaluate_lambada
from tridecode.tools.evaluate.prompt_command import evaluate_prompts
from tridecode.tools.help_groups import GroupedCommand
from tridecode.tools.serve.command import serve, tritonserver
from tridecode.tools.serve.front_command import front
from tridecode.tools.train_draft.command import train_draft

#: errors of the operating system that the user can fix; any other is a defect
_FIXABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE),
}


class _Group(TyperGroup):
    """Prints expected errors as one line with exit code 2; any other error is a defect and keeps its
    traceback.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)  # prints --help
        except BrokenPipeError:
            _end_without_stdout()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TridecodeError as error:
            _fail(str(error))
        except BrokenPipeError:
            _end_without_stdout()
        except OSError as error:
            if error.errno not in _FIXABLE:
                raise
            _fail(f"{error.filename or 'writing failed'}: {error.strerror}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _fail(text: str) -> NoReturn:
    """Print `error: <text>` and exit with 2. Of several lines, the first is the cause and comes last."""
    cause, *details = text.strip().splitlines() or ["unknown"]
    for line in details:
        typer.echo(line, err=True)
    typer.secho(f"error: {cause}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2) from None


def _end_without_stdout() -> NoReturn:
    """End as a program that SIGPIPE kills, without a message: the reader of stdout has closed it."""
    with open(os.devnull, "w") as sink:
        try:
            os.dup2(sink.fileno(), sys.stdout.fileno())  # so that the interpreter's flush at exit succeeds
        except (OSError, ValueError):  # stdout is not a file, or is closed
            pass
    raise typer.Exit(141) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut long options off on a narrow terminal
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve GPT-family language models behind NVIDIA Triton Inference Server.",
    epilog="Start with:  tridecode demo",
)
app.add_typer(bench_app, name="bench")
app.add_typer(adapters_app, name="adapters")
app.add_typer(cache_app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tridecode {version('tridecode')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of `tridecode` itself."""


app.command("build-repo", cls=GroupedCommand)(build_repo)
app.command()(serve)
app.command()(front)
app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)(tritonserver)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command("send-request")(send_request)
app.command("train-draft", cls=GroupedCommand)(train_draft)
app.command()(check)
app.command()(doctor)
app.command("evaluate-lambada")(evaluate_lambada)
app.command("evaluate-prompts")(evaluate_prompts)
app.command()(demo)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8
    spin_briefly(os.environ)  # before torch is loaded
    app()


if __name__ == "__main__":
    main()
