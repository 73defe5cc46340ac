"""HTTP to a service, in an event loop of a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx

from tridecode.backend.base.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineDownError,
    RequestError,
    TridecodeError,
    UnsupportedError,
)
from tridecode.backend.batches.target import Target

_CONNECT_S = 5.0
_BUSY = (429, 503)
#: a request that the service cannot take now is sent again for so long
_PATIENCE_S = 60.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0
_END_S = 5.0
_DONE = "[DONE]"
#: the service's codes and, for others, statuses -> class of the error
_CODES: dict[str, type[TridecodeError]] = {
    "context_length_exceeded": ContextLengthError,
    "unsupported_parameter": UnsupportedError,
    "engine_not_ready": EngineDownError,
    "queue_full": CapacityError,
    "deadline_exceeded": DeadlineError,
}
_STATUSES: dict[int, type[TridecodeError]] = {
    400: RequestError,
    401: ConfigError,
    403: ConfigError,
    404: RequestError,
    413: RequestError,
    429: CapacityError,
    503: EngineDownError,
    504: DeadlineError,
}


class ServiceClient:
    """Sends requests to one service. Used by any thread; `call` is for threads without an event loop."""

    def __init__(self, url: str, api_key: str, timeout_s: float, connections: int):
        """url: of HTTP, with or without /v1. timeout_s: longest silence. Raises ConfigError."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is not an address of HTTP; wanted http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        try:
            httpx.URL(self.url)
            options = Target(self.url, api_key).options()
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url}: {error}; wanted http://host:port") from None
        self._http = httpx.AsyncClient(**options, timeout=timeout, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin a coroutine in the client's loop; it must not raise. `cancel` of the result cancels it."""
        if self._loop.is_closed():
            work.close()
            raise EngineDownError(f"the connection to {self.url} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer to POST, or to GET without a body. Raises TridecodeErrors."""
        return self._result(self.send(path, body))

    async def send(self, path: str, body: Any = None) -> Any:
        """Do the same in the client's loop. A service that is busy is asked again for a while."""
        began, pause = time.monotonic(), _LEAST_PAUSE_S
        while True:
            try:
                response = await self._http.request("GET" if body is None else "POST", path, json=body)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            if response.status_code == 200:
                return self._json(response.content)
            if response.status_code not in _BUSY or time.monotonic() - began > _PATIENCE_S:
                raise _failure(response.status_code, response.content)
            await asyncio.sleep(_pause(response, pause))
            pause = min(_MOST_PAUSE_S, 2 * pause)

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yield the events of a stream. Raises TridecodeErrors, also for an event that is an error."""
        began, pause = time.monotonic(), _LEAST_PAUSE_S
        while True:
            try:
                async with self._http.stream("POST", path, json=body) as response:
                    if response.status_code == 200:
                        async for line in response.aiter_lines():
                            if line.startswith("data: ") and line != f"data: {_DONE}":
                                yield self._event(line[6:])
                        return
                    content = await response.aread()
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            if response.status_code not in _BUSY or time.monotonic() - began > _PATIENCE_S:
                raise _failure(response.status_code, content)
            await asyncio.sleep(_pause(response, pause))
            pause = min(_MOST_PAUSE_S, 2 * pause)

    def close(self) -> None:
        """Cancel what runs and close the connections."""
        if self._loop.is_closed():
            return
        self._result(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.start(work).result()

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    def _event(self, data: str) -> Any:
        event = self._json(data.encode())
        if "error" in event:
            raise _error(event["error"], 500)
        return event

    def _json(self, content: bytes) -> Any:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TridecodeError(f"{self.url} does not answer as an OpenAI service does")
        return found

    def _unreachable(self, error: Exception) -> EngineDownError:
        return EngineDownError(f"{self.url} does not answer: {error or type(error).__name__}")


def _failure(status: int, content: bytes) -> TridecodeError:
    """Return the error of an answer that is not 200."""
    try:
        return _error(json.loads(content)["error"], status)
    except (ValueError, KeyError, TypeError):
        return _error(content[:200].decode("utf-8", "replace"), status)


def _error(found: Any, status: int) -> TridecodeError:
    """found: the member `error` of an answer, or its text."""
    fields = found if isinstance(found, dict) else {"message": found}
    kind = _CODES.get(str(fields.get("code"))) or _STATUSES.get(status)
    text = str(fields.get("message"))
    return kind(text) if kind is not None else TridecodeError(f"{text} (status {status})")


def _pause(response: httpx.Response, own: float) -> float:
    """Return the seconds before a request is sent again. own: without a Retry-After."""
    try:
        return min(_MOST_PAUSE_S, max(own, float(response.headers.get("retry-after", ""))))
    except ValueError:
        return own
