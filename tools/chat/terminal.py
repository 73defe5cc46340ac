"""The loop of `tridecode chat`: reads lines, prints answers as they come, obeys commands."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.tools.chat.conversation import Conversation
from tridecode.tools.chat.sources import Question, Source

HELP = """\
/system TEXT      set the system message; without TEXT: remove it
/params           show the parameters; /params temperature=0.7 top_p=  sets one and resets another
/retry            drop the last answer and ask again
/clear            forget the conversation
/save FILE        write the conversation as JSON
/load FILE        read it again
/exit             leave, as Ctrl-D does
Ctrl-C stops an answer and keeps what it has."""


class Chat:
    """A conversation with one model. read: returns the next line of the user; EOFError ends the chat."""

    def __init__(self, source: Source, conversation: Conversation, read: Callable[[str], str]):
        self._source, self._conversation, self._read = source, conversation, read

    def run(self) -> None:
        """Talk until the user leaves."""
        kind = "chat" if self._source.chats else "the model has no chat template: it continues your text"
        _tell(f"{self._source.name}; {kind}. /help shows the commands")
        while True:
            try:
                line = self._read("> ")
            except KeyboardInterrupt:
                _tell("")
                continue
            except EOFError:
                return
            if not line.strip():
                continue
            try:
                if not self._take(line):
                    return
            except TridecodeError as error:
                typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)

    def _take(self, line: str) -> bool:
        """Obey a command, or ask; return False to leave."""
        if not line.startswith("/"):
            self._ask(self._conversation.ask(line))
            return True
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: _tell(HELP),
            "system": self._system,
            "params": self._params,
            "retry": lambda _: self._ask(self._conversation.retry()),
            "clear": lambda _: self._conversation.messages.clear(),
            "save": lambda text: self._conversation.save(_file(text), self._source.name),
            "load": lambda text: self._conversation.load(_file(text)),
        }
        if name not in commands:
            raise ConfigError(f"/{name} is not a command; /help lists them")
        commands[name](rest)
        return True

    def _system(self, text: str) -> None:
        self._conversation.system = text

    def _params(self, text: str) -> None:
        self._conversation.set_values(text.split())
        values = self._conversation.values
        _tell(" ".join(f"{name}={value}" for name, value in values.items()) or "the model's defaults")

    def _ask(self, question: Question) -> None:
        """Print an answer as it comes. Ctrl-C stops it; what it has so far stays in the conversation."""
        began, first, tokens, text = time.monotonic(), 0.0, 0, ""
        stream = self._source.answer(question)
        stopped = False
        try:
            for new, count in stream:
                first = first or time.monotonic()
                text, tokens = text + new, tokens + count
                typer.echo(new, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
        except BaseException:
            self._conversation.failed()
            raise
        finally:
            stream.close()  # type: ignore[attr-defined]
        ended = time.monotonic()
        if not text.endswith("\n"):
            typer.echo("")
        self._conversation.answered(text)
        _tell(_figures(tokens, first - began if first else ended - began, ended - began, stopped))


def _figures(tokens: int, first_s: float, total_s: float, stopped: bool) -> str:
    later_s = total_s - first_s
    rate = f", {(tokens - 1) / later_s:.1f} tokens/s" if tokens > 1 and later_s > 0 else ""
    end = ", stopped" if stopped else ""
    return f"{tokens} tokens, the first after {first_s:.2f} s{rate}{end}"


def _file(text: str) -> Path:
    words = shlex.split(text)
    if len(words) != 1:
        raise ConfigError("wanted the name of one file")
    return Path(words[0]).expanduser()


def _tell(text: str) -> None:
    typer.secho(text, dim=True, err=True)


def line_reader() -> Callable[[str], str]:
    """Return a reader with history and editing on a terminal, else one of standard input."""
    if sys.stdin.isatty():
        try:
            from prompt_toolkit import PromptSession
        except ImportError:
            import readline  # noqa: F401  input() then has history and editing

            return input
        session: PromptSession[str] = PromptSession()
        return session.prompt
    return lambda _: _line()


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
