"""The service that answers a batch: its address and its properties."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tridecode.backend.base.errors import ConfigError, EngineDownError

_LOOK_S = 0.2
_PROBE_TIMEOUT_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: statuses that say that the service is away, and not that the request is wrong
AWAY = (502, 503)
#: concurrency where the service does not say how many sequences it computes at once
USUAL_CONCURRENCY = 64
MAX_CONCURRENCY = 1024


@dataclass(frozen=True)
class Target:
    """A service. ended: the reason once its process has ended, else ""."""

    url: str
    key: str = ""
    ended: Callable[[], str] = lambda: ""

    def options(self) -> dict[str, Any]:
        """Options of an httpx client. A service of this machine is reached without a proxy."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        proxied = urlsplit(self.url).hostname not in _LOOPBACK
        return {"base_url": self.url, "headers": headers, "trust_env": proxied}


@dataclass(frozen=True)
class Described:
    """Properties of a service. is_ours: it is `tridecode front`, which takes `priority`. sequences: computed
    at once; None: unknown.
    """

    is_ours: bool
    sequences: int | None

    def concurrency(self) -> int:
        """Return how many requests keep it busy: one per sequence, and a quarter more that wait for their
        turn."""
        if self.sequences is None:
            return USUAL_CONCURRENCY
        return min(MAX_CONCURRENCY, self.sequences + max(2, self.sequences // 4))


def service_url(text: str) -> str:
    """Return the address without a path: https://host/v1 is https://host. Raises ConfigError."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        url = text.rstrip("/")
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"--url is {text!r}; wanted an address such as http://localhost:9000")
    return url.removesuffix("/v1")


def describe(
    target: Target, timeout_s: float, show: Callable[[str], object], starts: bool = False
) -> Described:
    """Wait until the service is ready, and read its list of models.

    show: called with the state of the engine. starts: it has just been started, so that a refused connection
    is not the end. Raises ConfigError where nothing answers or the key is wrong, EngineDownError where it is
    not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    with httpx.Client(timeout=_PROBE_TIMEOUT_S, **target.options()) as http:
        while state := _state(http, target, starts):
            show(state)
            if time.monotonic() > deadline:
                raise EngineDownError(f"{target.url} was not ready after {timeout_s:.0f} s: {state}")
            time.sleep(_LOOK_S)
        try:
            response = http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"{target.url}/v1/models does not answer: {reason_of(error)}") from None
    if response.status_code == 401:
        raise ConfigError(key_error(target.url, response))
    return _described(response)


def key_error(url: str, response: httpx.Response) -> str:
    text = f"{url} refuses the API key with {response.status_code}: {message_of(response.content)}"
    return f"{text}; wanted --api-key or TRIDECODE_API_KEY"


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def message_of(body: bytes, most: int = 500) -> str:
    """Return the message of an error in OpenAI's shape, else the beginning of the text."""
    found = _json(body)
    for key in ("error", "message"):
        found = found.get(key, found) if isinstance(found, dict) else found
    text = found if isinstance(found, str) else body.decode("utf-8", "replace")
    return text[:most]


def _state(http: httpx.Client, target: Target, starts: bool) -> str:
    """Return why the service is not ready; "": it is. A service without /health is taken for ready."""
    if ended := target.ended():
        raise EngineDownError(ended)
    try:
        response = http.get("/health")
    except httpx.HTTPError as error:
        if starts:
            return "starting"
        raise ConfigError(f"no service answers at {target.url}: {reason_of(error)}") from None
    if response.status_code not in AWAY:
        return ""
    found = _json(response.content)
    engines = found.get("engines") if isinstance(found, dict) else None
    states = [one for one in engines or () if isinstance(one, dict)]
    for one in states:
        if one.get("phase") == "failed":
            raise EngineDownError(f"the engine does not start: {one.get('detail')}")
    return "; ".join(f"{one.get('phase')}, {one.get('detail')}" for one in states) or "not ready"


def _described(response: httpx.Response) -> Described:
    found = _json(response.content)
    cards = found.get("data") if isinstance(found, dict) else None
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    sequences = card.get("max_num_seqs")
    is_number = isinstance(sequences, int) and sequences > 0
    return Described(card.get("owned_by") == "tridecode", sequences if is_number else None)


def _json(body: bytes) -> Any:
    try:
        return httpx.Response(200, content=body).json()
    except ValueError:
        return None
