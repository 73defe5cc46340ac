"""The models that a chat talks to: an OpenAI service by HTTP, or a checkpoint in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError

_CONNECT_S, _SILENT_S = 5.0, 120.0
_DONE = "[DONE]"

#: parameters that /params sets: name -> type
PARAMETERS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}


@dataclass(frozen=True)
class Question:
    """A turn: the messages of a conversation, or the text that a base model continues.

    values: of PARAMETERS, those that are set.
    """

    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Answers questions, one at a time."""

    #: the model's name
    name: str
    #: whether the model has a chat template; without one it continues texts
    chats: bool

    def answer(self, question: Question) -> Iterator[tuple[str, int]]:
        """Yield (new text, its tokens). Closing the generator cancels the request. Raises TridecodeError."""
        ...

    def close(self) -> None: ...


class Service:
    """An OpenAI service. url: with or without /v1."""

    def __init__(self, url: str, key: str = ""):
        """Raises EngineDownError where nothing answers, ConfigError for a URL that is not one of HTTP."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is not an address of HTTP; wanted http://host:port")
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            timeout = httpx.Timeout(_SILENT_S, connect=_CONNECT_S)
            self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)
            models = self._get("/v1/models")["data"]
            self.name = str(models[0]["id"])
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url}: {error}; wanted http://host:port") from None
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError(f"{url} does not answer as an OpenAI service does") from None
        self.chats = self._has_template()

    def answer(self, question: Question) -> Iterator[tuple[str, int]]:
        path = "/v1/chat/completions" if self.chats else "/v1/completions"
        asked: dict[str, Any] = {"messages": question.messages} if self.chats else {"prompt": question.text}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": self.name, "stream": True, "stream_options": options, **asked, **question.values}
        tokens = 0
        for chunk in self._stream(path, body):
            now = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices", ()):
                text = choice["delta"].get("content") if self.chats else choice["text"]
                yield text or "", now - tokens
                tokens = now

    def close(self) -> None:
        self._client.close()

    def _has_template(self) -> bool:
        """Return whether chats are served: the service renders a message for /tokenize, or refuses."""
        body = {"model": self.name, "messages": [{"role": "user", "content": "a"}]}
        try:
            return self._client.post("/tokenize", json=body).status_code == 200
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _get(self, path: str) -> Any:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        self._check(response.status_code, response.content)
        return response.json()

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    self._check(response.status_code, response.read())
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data in (line, _DONE):
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise TridecodeError(str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _check(self, status: int, body: bytes) -> None:
        if status == 200:
            return
        try:
            text = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = body[:200].decode("utf-8", "replace")
        error = EngineDownError if status == 503 else TridecodeError
        raise error(f"{text} (status {status})")

    def _unreachable(self, error: Exception) -> TridecodeError:
        return EngineDownError(f"{self._url} does not answer: {error or type(error).__name__}")


class Local:
    """A checkpoint or a repository, run by `LLM`."""

    def __init__(self, model: str, cache: Path | None = None):
        from tridecode.tools.build_repo.cache import default_folder
        from tridecode.tools.llm.llm import LLM

        self.log = default_folder() / "chat.log"
        self._llm = LLM(model, cache=cache, log=self.log)
        self.name, self.chats = self._llm.model_name, self._llm.has_chat_template

    def answer(self, question: Question) -> Iterator[tuple[str, int]]:
        from tridecode.tools.llm.params import SamplingParams

        params = SamplingParams(**{"max_tokens": None, **question.values})
        if self.chats:
            stream = self._llm.stream_chat(question.messages, params)
        else:
            stream = self._llm.stream(question.text, params)
        text, tokens = "", 0
        with closing(stream):  # type: ignore[type-var]
            for found in stream:
                answer = found.outputs[0]
                yield answer.text[len(text) :], len(answer.token_ids) - tokens
                text, tokens = answer.text, len(answer.token_ids)

    def close(self) -> None:
        self._llm.close()


def open_source(where: str, cache: Path | None, key: str) -> Source:
    """Return the model at a URL, or of a checkpoint or repository. Raises TridecodeError."""
    if "://" in where:
        return Service(where, key)
    return Local(where, cache)
