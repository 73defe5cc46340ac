"""The ASGI application of a worker: routes, API keys, origins and errors."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tridecode.backend.front.access import Keys
from tridecode.backend.front.errors import ApiError, api_error, shown
from tridecode.backend.front.routes import (
    adapters,
    batches,
    chat,
    colossal,
    completions,
    embeddings,
    files,
    generate,
    openapi,
    status,
    tokens,
)
from tridecode.backend.front.service import FrontService

#: routes that need no key
OPEN = ("/health",)


def application(front: FrontService) -> Starlette:
    routes = [
        Route("/v1/completions", completions.completions, methods=["POST"]),
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/inference/v1/generate", generate.generate, methods=["POST"]),
        Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/generate", colossal.generate, methods=["POST"]),
        Route("/completion", colossal.completion, methods=["POST"]),
        Route("/chat", colossal.chat_answer, methods=["POST"]),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/v1/files", files.upload, methods=["POST"]),
        Route("/v1/files", files.listed),
        Route("/v1/files/{file_id}", files.retrieve),
        Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.listed),
        Route("/v1/batches/{batch_id}", batches.retrieve),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/openapi.json", openapi.document),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/version", status.release),
    ]
    middleware = []
    if front.settings.cors:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(front.settings.cors),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-tridecode-no-effect", "retry-after"],
            )
        )
    middleware.append(Middleware(Gate, keys=front.keys, origins=front.settings.cors))
    handlers = {
        ApiError: _on_error,
        HTTPException: _on_error,
        Exception: _on_error,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.front = front
    return app


class Gate:
    """Refuses requests without a known key, and those of web pages from other origins.

    A page can send a request even if it cannot read the answer, so CORS headers alone do not keep it out.
    """

    def __init__(self, app: ASGIApp, keys: Keys, origins: Iterable[str]):
        self._app, self._keys, self._origins = app, keys, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            try:
                self._check_origin(headers)
                if scope["path"] not in OPEN:
                    self._keys.check(headers.get(b"authorization", b"").decode("latin-1"))
            except ApiError as error:
                await _response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or "*" in self._origins or origin in self._origins:
            return
        if urlsplit(origin).netloc == headers.get(b"host", b"").decode("latin-1"):
            return
        text = f"pages of {shown(origin)} may not call this service; --cors names those that may"
        raise ApiError(403, text, code="origin_not_allowed")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _http_error(request, error)
    return _response(api_error(error))


def _http_error(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 404:
        text = f"the route {shown(request.url.path)} does not exist; /openapi.json lists the routes"
        return ApiError(404, text, code="unknown_url")
    if error.status_code == 405:
        text = f"{request.url.path} does not take {request.method}"
        return ApiError(405, text, code="method_not_allowed", headers=dict(error.headers or {}))
    return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))


def _response(error: ApiError) -> Response:
    return Response(error.body, error.status, headers=error.headers, media_type="application/json")
