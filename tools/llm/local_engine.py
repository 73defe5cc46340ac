"""The engine behind `LLM`: found or started in processes of its own, which end with this one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.process.repository import find_engine_dir, read_repository
from tridecode.backend.service.engine_service import EngineService
from tridecode.backend.service.owner import Owner
from tridecode.backend.service.text_service import TextService
from tridecode.backend.service.text_tokenizer import TextTokenizer
from tridecode.backend.wire.messages import Limits


@contextlib.contextmanager
def logging_to(file: str | Path | None) -> Iterator[None]:
    """Append the lines of processes that are started meanwhile to a file; None: leave them on stderr."""
    if file is None:
        yield
        return
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be written: {error.strerror}") from None
    ours = os.dup(2)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


class LocalEngine:
    """A repository's engines and tokenizer. Used by any thread."""

    def __init__(self, repository: Path, chat_template: Path | None, start_timeout_s: float):
        """Raises ConfigError for a folder that is not a repository, EngineDownError with the engine's reason
        if it is not ready in time."""
        # the engine's Python has what this one has
        os.environ.setdefault("TRIDECODE_ENGINE_PYTHON", sys.executable)
        engine_dir = find_engine_dir(repository)
        values = read_repository(engine_dir)
        self.adds_special_tokens: bool = values.get("add_special_tokens", True)
        self.skips_special_tokens: bool = values.get("skip_special_tokens", True)
        self.lora_dir: str = values.get("lora_dir", "")
        self.tokenizer = TextTokenizer(
            Path(values["tokenizer_dir"]), "the tokenizer's folder", self.skips_special_tokens
        )
        self._services: list[EngineService] = []
        self._lock = threading.Lock()
        try:
            for number in range(values["num_engines"]):
                owner = Owner.this_process()
                self._services.append(
                    EngineService.open(
                        str(engine_dir), "python", owner, hold_s=start_timeout_s, number=number
                    )
                )
            self.texts = [
                TextService(service, self.tokenizer, values.get("stop_ids", ()), chat_template=chat_template)
                for service in self._services
            ]
            for service in self._services:
                service.link.wait_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise
        self._open = [0] * len(self._services)

    def close(self) -> None:
        """Disconnect. The engine's processes end a moment later."""
        for service in self._services:
            service.close()

    @property
    def limits(self) -> Limits:
        return self.texts[0].engine.limits()

    def choose(self, session: int | None = None) -> int:
        """Return the number of an engine, and count one more request for it: the engine with the fewest, or
        that of a session.
        """
        with self._lock:
            number = min(range(len(self._open)), key=self._open.__getitem__)
            if session is not None:
                number = session % len(self._open)
            self._open[number] += 1
            return number

    def ended(self, number: int) -> None:
        with self._lock:
            self._open[number] -= 1

    def end_session(self, number: int) -> None:
        self._services[number % len(self._services)].link.end_session(number)

    def room(self) -> int:
        """Return how many requests may be open at once."""
        return max(1, self.limits.max_queued_requests) * len(self.texts)

    def check_adapter(self, name: str) -> None:
        """Raise ConfigError for an adapter that the repository does not have."""
        if name and not self.lora_dir:
            raise ConfigError(f"the adapter {name!r} does not exist: the repository serves no adapters")
