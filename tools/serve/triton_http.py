"""The calls of Triton's HTTP interface that `tridecode serve` needs, with the standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

from tridecode.tools.serve import triton_access


class TritonHttpError(Exception):
    """The server answered with an error, or did not answer."""


class ModelState(NamedTuple):
    """A row of the repository index. state: READY, LOADING, UNLOADING, UNAVAILABLE; "" if never loaded."""

    name: str
    state: str
    reason: str


class TritonHttp:
    """address: "host:port". key: of the control APIs (triton_access.py), sent to those of the repository."""

    def __init__(self, address: str, key: str = "") -> None:
        self._base = f"http://{address}"
        self._headers = {triton_access.HEADER: key} if key else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy

    def ready(self, timeout_s: float = 2.0) -> bool:
        """Return whether the server reports that it and all its models are ready."""
        try:
            self._get("/v2/health/ready", timeout_s)
        except TritonHttpError:
            return False
        return True

    def index(self) -> list[ModelState]:
        rows = json.loads(self._post("/v2/repository/index", 5.0))
        return [ModelState(row["name"], row.get("state", ""), row.get("reason", "")) for row in rows]

    def load(self, model: str, timeout_s: float = 1800.0) -> None:
        """Load a model; return when it is loaded."""
        self._post(f"/v2/repository/models/{urllib.parse.quote(model)}/load", timeout_s)

    def unload(self, model: str) -> None:
        """Unload a model; return at once; open requests continue."""
        self._post(f"/v2/repository/models/{urllib.parse.quote(model)}/unload", 30.0)

    def _get(self, path: str, timeout_s: float) -> bytes:
        return self._call(urllib.request.Request(self._base + path), timeout_s)

    def _post(self, path: str, timeout_s: float) -> bytes:
        request = urllib.request.Request(
            self._base + path, data=b"{}", headers=dict(self._headers), method="POST"
        )
        return self._call(request, timeout_s)

    def _call(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise TritonHttpError(f"{request.selector}: {error.code} {_message(error.read())}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TritonHttpError(f"{request.selector}: {error}") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
