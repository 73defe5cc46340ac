"""Sends requests; repeats those that a service could not take."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable

import httpx
import msgspec

from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.batches.lines import Request
from tridecode.backend.batches.records import LineError, Response, one_line
from tridecode.backend.batches.target import AWAY, Target, key_error, message_of, reason_of

#: times that a line is sent, if the service goes away each time. Others may have been the cause.
MAX_SENDS = 8
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
_HEALTH_TIMEOUT_S = 10.0


class Sender:
    """Connections to a service, each with a client of its own.

    httpx's pool looks at each of its connections several times for every request: with 240 of them, an answer
    cost 0.1 s of processor time.

    While the service is away, all requests wait, and one task polls its health. patience_s: longest absence,
    and the longest time for which one line is repeated after 429. timeout_s: of one request.
    """

    def __init__(self, target: Target, patience_s: float, timeout_s: float):
        self._target, self._patience_s = target, patience_s
        self._timeout = httpx.Timeout(timeout_s, connect=30.0, pool=None)
        # httpx would read the certificates again for each client
        self._certificates = httpx.create_ssl_context(trust_env=target.options()["trust_env"])
        self._free: list[httpx.AsyncClient] = []
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._probe: asyncio.Task[None] | None = None
        #: why the service is away; "": it is not
        self.absence = ""

    async def send(self, request: Request) -> Response:
        """Return the answer to a request.

        Raises LineError for a request that is refused or that is repeated in vain; EngineDownError once the
        service has been away for too long; ConfigError where it refuses the key.
        """
        sends, pause, began = 0, Pause(), time.monotonic()
        while True:
            await self._wait_up()
            try:
                response = await self._post(request)
            except httpx.RequestError as error:
                sends, why = sends + 1, f"{type(error).__name__}: {reason_of(error)}"
                self._went_away(why)
                if sends >= MAX_SENDS:
                    raise _given_up(request, f"sent {sends} times: {why}") from None
                await pause.wait()
                continue
            status = response.status_code
            if status == 401:
                raise ConfigError(key_error(self._target.url, response))
            if status in AWAY:
                sends += 1
                self._went_away(f"{status}: {message_of(response.content)}")
            if sends >= MAX_SENDS or (status == 429 and time.monotonic() - began > self._patience_s):
                raise _refusal(request, response)
            if status != 429 and status not in AWAY:
                return _answer(request, response)
            await pause.wait(retry_after(response.headers.get("retry-after", "")))

    async def close(self) -> None:
        """Close all connections; no `send` may run any more."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        for client in self._free:
            await client.aclose()

    async def _post(self, request: Request) -> httpx.Response:
        client = self._free.pop() if self._free else self._client()
        try:
            return await client.post(
                request.url, content=request.body, headers={"content-type": "application/json"}
            )
        finally:
            self._free.append(client)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=self._timeout, verify=self._certificates, **self._target.options())

    async def _wait_up(self) -> None:
        while not self._is_up.is_set():
            probe = self._probe
            assert probe is not None
            await asyncio.shield(probe)  # raises what ended it

    def _went_away(self, why: str) -> None:
        if self._is_up.is_set():
            self._is_up.clear()
            self.absence = why
            self._probe = asyncio.create_task(self._wait_for_health())

    async def _wait_for_health(self) -> None:
        http = self._client()
        try:
            await self._poll(http)
        finally:
            await http.aclose()

    async def _poll(self, http: httpx.AsyncClient) -> None:
        deadline, pause = time.monotonic() + self._patience_s, Pause()
        while True:
            if ended := self._target.ended():
                raise EngineDownError(f"{ended}; run the same command again to continue")
            try:
                response = await http.get("/health", timeout=_HEALTH_TIMEOUT_S)
                if response.status_code not in AWAY:
                    break
                self.absence = f"{response.status_code}: {message_of(response.content)}"
            except httpx.HTTPError as error:
                self.absence = reason_of(error)
            if time.monotonic() > deadline:
                text = f"{self._target.url} was away for {self._patience_s:.0f} s ({self.absence})"
                raise EngineDownError(f"{text}; run the same command again to continue")
            await pause.wait()
        self.absence = ""
        self._is_up.set()


class Pause:
    """Pauses that double, up to MAX_PAUSE_S, half of each by chance."""

    def __init__(self, chance: Callable[[], float] = random.random):
        self._next_s, self._chance = FIRST_PAUSE_S, chance

    async def wait(self, least_s: float = 0.0) -> None:
        await asyncio.sleep(self.seconds(least_s))

    def seconds(self, least_s: float = 0.0) -> float:
        """Return the next pause, at least as long as the service says; MAX_PAUSE_S limits that, too."""
        own, self._next_s = self._next_s, min(MAX_PAUSE_S, 2 * self._next_s)
        return max(own * (0.5 + 0.5 * self._chance()), min(MAX_PAUSE_S, least_s))


def retry_after(text: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 for anything else."""
    try:
        return max(0.0, float(text)) if text.strip()[:1].isdigit() else _until(text)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    return max(0.0, email.utils.parsedate_to_datetime(date).timestamp() - time.time())


def _answer(request: Request, response: httpx.Response) -> Response:
    if response.status_code != 200:
        raise _refusal(request, response)
    found = _response(response)
    if found is None:
        start = response.content[:100].decode("utf-8", "replace")
        raise _given_up(request, f"the service's answer is not JSON: {start!r}", "invalid_response")
    return found


def _response(response: httpx.Response) -> Response | None:
    body = one_line(response.content)
    if body is None:
        return None
    return Response(response.status_code, response.headers.get("x-request-id", ""), body)


class _Fields(msgspec.Struct):
    code: str | None = None
    param: str | None = None


class _Body(msgspec.Struct):
    error: _Fields


def _refusal(request: Request, response: httpx.Response) -> LineError:
    """The service's error, with its own code and parameter."""
    try:
        fields = msgspec.json.decode(response.content, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = _Fields(code=f"status_{response.status_code}")
    return LineError(
        request.line,
        fields.code or f"status_{response.status_code}",
        message_of(response.content),
        custom_id=request.custom_id,
        param=fields.param,
        response=_response(response),
    )


def _given_up(request: Request, text: str, code: str = "service_unavailable") -> LineError:
    return LineError(request.line, code, text, custom_id=request.custom_id)
