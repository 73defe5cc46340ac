"""/health, /metrics, /v1/models, /version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.errors import ApiError, shown
from tridecode.backend.front.service import FrontService


class ModelCard(msgspec.Struct):
    """A model or an adapter. parent: an adapter's base model. max_model_len: tokens of prompt and answer.
    max_num_seqs: sequences that all engines of the model compute at once. None: not known yet."""

    id: str
    created: int
    parent: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    object: str = "model"
    owned_by: str = "tridecode"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def models(request: Request) -> Response:
    return json_response(ModelList(_cards(FrontService.of(request))))


async def model(request: Request) -> Response:
    name = request.path_params["name"]
    for card in _cards(FrontService.of(request)):
        if card.id == name:
            return json_response(card)
    raise ApiError(404, f"the model {shown(name)} does not exist", param="model", code="model_not_found")


def _cards(front: FrontService) -> list[ModelCard]:
    served, created = front.model, front.settings.created
    limits = served.known_limits
    length = limits.max_sequence_tokens if limits is not None else None
    rows = limits.max_sequences * front.settings.num_engines if limits is not None else None
    cards = [ModelCard(name, created, None, length, rows) for name in served.names]
    return cards + [ModelCard(name, created, served.name, length, rows) for name in served.adapters()]


async def health(request: Request) -> Response:
    """Answer 200 while the engine serves; 503 with the reason while it does not, or while the server
    drains."""
    states = FrontService.of(request).model.states()
    phases = [{"phase": state.phase, "detail": state.detail, "draining": state.draining} for state in states]
    ready = any(state.phase == "ready" and not state.draining for state in states)
    response = json_response(
        {"status": "ok" if ready else "unavailable", "engines": phases}, 200 if ready else 503
    )
    if not ready:
        response.headers["retry-after"] = "2"
    return response


async def metrics(request: Request) -> Response:
    front = FrontService.of(request)
    ready = [state.phase == "ready" for state in front.model.states()]
    page = front.counts.page(front.model.engine_names, front.model.beats(), ready)
    return Response(page, media_type="text/plain; version=0.0.4")


async def release(request: Request) -> Response:
    return json_response({"version": version("tridecode")})
