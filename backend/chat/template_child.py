"""The child process of templates.py: renders templates from a socket, with limits on itself.

    python -I template_child.py FD SECONDS MEMORY_BYTES CHARACTERS [FOLDER...]

FD: a connected socket. FOLDER: appended to sys.path. A frame is a length of 8 bytes and JSON. The environment
is transformers' (utils/chat_template_utils.py): its sandbox, its tojson, its tags. It lacks `**` and limits
products, so that the usual bombs get a clear error. It loads only backend/base/child_frames.py of the
package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

_MAX_PRODUCT = 1 << 20  # largest result of `*`: an int, or the length of a repeated text
_KEPT_TEMPLATES = 16
_FRAMES = Path(__file__).parents[1] / "base" / "child_frames.py"


def main(arguments: list[str]) -> None:
    frames = _load(_FRAMES)
    connection = socket.socket(fileno=int(arguments[0]))
    seconds, memory, characters = float(arguments[1]), int(arguments[2]), int(arguments[3])
    sys.path.extend(arguments[4:])
    try:
        renderer = _renderer(seconds, characters)
    except ImportError as error:
        frames.send(connection, {"fault": f"{error}; wanted: pip install 'jinja2>=3.1.6'"})
        return
    frames.limit_memory(memory)
    limit = _ProcessorTime(seconds)
    frames.send(connection, {"ready": True})
    for request in frames.requests(connection):
        limit.renew()
        answer = renderer.answer(**request)
        del request
        if isinstance(answer, bytes):
            frames.send_text(connection, answer)
            continue
        frames.send(connection, answer)
        if answer.get("ended"):
            return


def _load(path: Path) -> Any:
    """Import a file by its path, because sys.path may lack the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _ProcessorTime:
    """Lets the kernel end the process (SIGXCPU) some time after a request, even if its parent is gone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._soft = 0  # whole seconds, as the kernel counts
        self._hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def renew(self) -> None:
        """Allow this many more seconds, and up to 2 for what the whole seconds cut off."""
        soft = int(time.process_time() + self._seconds) + 2
        if soft != self._soft:
            resource.setrlimit(resource.RLIMIT_CPU, (soft, self._hard))
            self._soft = soft


def _renderer(seconds: float, characters: int) -> Any:
    """Import jinja2 only here, so that its absence is reported over the socket."""
    import jinja2.utils
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks the assistant's tokens for training: its body is shown."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """namespace() without names that lead into Python."""

        def __init__(*arguments: Any, **named: Any) -> None:
            own, attributes = arguments[0], dict(*arguments[1:], **named)
            for name in attributes:
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(own, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace.check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"the attribute {name!r} of a namespace begins with _")

    class Dict:
        """dict() without the attributes of the class."""

        def __call__(self, *arguments: Any, **named: Any) -> dict:
            return dict(*arguments, **named)

        def fromkeys(self, *arguments: Any) -> dict:
            return dict.fromkeys(*arguments)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise SecurityError("** is not allowed in a chat template")
            sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
            are_numbers = all(isinstance(size, (int, float)) for size in sizes)
            if are_numbers and abs(sizes[0] * sizes[1]) > _MAX_PRODUCT:
                raise SecurityError(f"a product is larger than {_MAX_PRODUCT:,}")
            return left * right

    class Renderer:
        def __init__(self) -> None:
            self._environment = Environment(
                trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
            )
            self._environment.filters["tojson"] = _to_json
            self._environment.globals.update(
                raise_exception=_raise, strftime_now=_now, dict=Dict(), namespace=Namespace
            )
            self._templates: dict[str, Any] = {}

        def answer(self, source: str, values: dict[str, Any]) -> bytes | dict[str, Any]:
            """Return the text in UTF-8, or {"fault": ...}."""
            try:
                return self._render(source, values)
            except MemoryError:
                return {"fault": "it needs more memory than a template may use", "ended": True}
            except TemplateError as error:
                return {"fault": str(error)[:1000]}
            except Exception as error:  # a template can make Python raise nearly anything
                return {"fault": f"{type(error).__name__}: {str(error)[:1000]}"}

        def _render(self, source: str, values: dict[str, Any]) -> bytes:
            if source not in self._templates:
                if len(self._templates) >= _KEPT_TEMPLATES:
                    self._templates.clear()
                self._templates[source] = self._environment.from_string(source)
            pieces, size, deadline = [], 0, time.monotonic() + seconds
            for piece in self._templates[source].generate(**values):
                size += len(piece)
                if size > characters:
                    raise SecurityError(f"it renders more than {characters:,} characters")
                if time.monotonic() > deadline:
                    raise SecurityError(f"it runs for more than {seconds:g} s")
                pieces.append(piece)
            return "".join(pieces).encode("utf-8")  # raises for a lone surrogate

    def _raise(message: object) -> None:
        raise TemplateError(str(message))

    return Renderer()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # nothing to flush, and a large heap takes long to free
