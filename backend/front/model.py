"""The model that a worker serves: its names, its adapters, and the engine behind it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tridecode.backend.base.errors import EngineDownError, TridecodeError
from tridecode.backend.front.chats.prompts import ChatPrompts
from tridecode.backend.front.engines import open_engines
from tridecode.backend.front.errors import ApiError, shown
from tridecode.backend.front.reading import Bells, Reader
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.service.engine_service import EngineService
from tridecode.backend.service.text_request import TextRequest
from tridecode.backend.service.text_service import TextService
from tridecode.backend.service.text_tokenizer import TextTokenizer
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.backend.wire.messages import EngineBeat, EngineState, Limits

_log = logging.getLogger("tridecode.front")
_T = TypeVar("_T")


class ServedModel:
    """The texts of one tokenizer and the engines of one model; a request goes to the engine with the fewest
    open ones."""

    def __init__(
        self,
        settings: FrontSettings,
        tokenizer: TextTokenizer,
        engines: Mapping[str, EngineService],
        bells: Bells,
    ):
        """engines: by their names in metrics."""
        self.settings, self.tokenizer = settings, tokenizer
        template = Path(settings.chat_template) if settings.chat_template else None
        self._engines = [
            TextService(
                engine,
                self.tokenizer,
                settings.stop_ids,
                settings.max_prompt_bytes,
                settings.max_request_bytes,
                template,
            )
            for engine in engines.values()
        ]
        self.engine_names = list(engines)
        self._open, self._last = [0] * len(engines), 0
        self._bells = bells
        self._token_texts: dict[bool, TokenTexts] = {}
        self.chats = ChatPrompts(self.tokenizer.folder, template, settings.tool_call_parser)
        #: does work that would hold the event loop up
        self.worker = ThreadPoolExecutor(1, "worker")

    @classmethod
    def connect(cls, settings: FrontSettings, bells: Bells) -> ServedModel:
        tokenizer = TextTokenizer(
            Path(settings.tokenizer_dir), "the tokenizer's folder", settings.skip_special_tokens
        )
        num_tokens = tokenizer.tokenizer.get_vocab_size(with_added_tokens=False)
        return cls(settings, tokenizer, open_engines(settings, num_tokens), bells)

    def close(self) -> None:
        self.chats.close()
        for texts in self._engines:
            texts.engine.close()

    # ------------------------------------------------------------ names

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base model; the first one is shown."""
        limits = self.known_limits
        own = limits.model_name if limits is not None else ""
        return self.settings.names or (own or Path(self.settings.engine_dir).parent.name,)

    @property
    def name(self) -> str:
        return self.names[0]

    def adapters(self) -> list[str]:
        """Names of the adapters that requests may name as their model."""
        if not self.settings.lora_dir:
            return []
        try:
            with os.scandir(self.settings.lora_dir) as entries:
                return sorted(entry.name for entry in entries if _is_adapter(entry))
        except OSError:
            return []

    def find(self, name: str | None) -> tuple[str, str]:
        """(the model's name for the answer, the adapter or "") of the name in a request. ApiError 404."""
        if name is None or name in self.names:
            return name or self.name, ""
        if self.settings.lora_dir and name in self.adapters():
            return name, name
        known = ", ".join([*self.names, *self.adapters()][:8])
        text = f"the model {shown(name)} does not exist; there are {known}"
        raise ApiError(404, text, param="model", code="model_not_found")

    # ------------------------------------------------------------ the engine

    @property
    def texts(self) -> TextService:
        return self._engines[0]

    @property
    def known_limits(self) -> Limits | None:
        """Limits of an engine that is ready, or was; None before the first one."""
        found = (texts.engine.link.limits() for texts in self._engines)
        return next((limits for limits in found if limits is not None), None)

    def limits(self) -> Limits:
        """Raises EngineDownError before the first engine was ready."""
        return self.known_limits or self._engines[0].engine.limits()

    def states(self) -> list[EngineState]:
        return [texts.engine.link.state() for texts in self._engines]

    def beats(self) -> list[EngineBeat | None]:
        return [texts.engine.link.beat() for texts in self._engines]

    def check_open(self) -> None:
        """Raise EngineDownError once the server drains: open requests continue, new ones would be cut off."""
        if any(state.draining for state in self.states()):
            raise EngineDownError("the server is about to stop and takes no new requests")

    async def prepare(self) -> None:
        """Make what the first chat would wait for. Errors are left to that chat."""
        try:
            self.tokenizer.view_of(None, self.chats.shown_tokens())
            await self.chats.start()
        except (TridecodeError, ApiError) as error:
            _log.error("chats cannot be served: %s", error)

    def token_texts(self, skip_special: bool | None = None) -> TokenTexts:
        """The text of single tokens, for log probabilities."""
        key = self.settings.skip_special_tokens if skip_special is None else skip_special
        if key not in self._token_texts:
            self._token_texts[key] = TokenTexts(self.tokenizer.view_of(key))
        return self._token_texts[key]

    async def run(self, elsewhere: bool, work: Callable[..., _T], *arguments: Any) -> _T:
        """Call it: here, or on the thread for what would hold the event loop up."""
        if not elsewhere:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.worker, work, *arguments)

    def begin(self, asked: TextRequest, label: str, timeout_s: float = 0.0) -> Reader:
        """Submit a request; `end` must follow. Raises what TextService.submit does."""
        ready = [i for i, state in enumerate(self.states()) if state.phase == "ready"]
        count = len(self._engines)
        # engines with equal numbers of open requests take turns
        number = min(ready or range(count), key=lambda i: (self._open[i], (i - self._last - 1) % count))
        self._last = number
        reader = Reader(self._bells)
        reader.stream = self._engines[number].submit(asked, reader.ring, label=label, timeout_s=timeout_s)
        reader.engine = number
        self._open[number] += 1
        return reader

    def end(self, reader: Reader) -> None:
        """The answer has been read, or nobody will read it."""
        self._open[reader.engine] -= 1
        if not reader.stream.ended:
            reader.stream.cancel()


def _is_adapter(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()
