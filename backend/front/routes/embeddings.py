"""/v1/embeddings, which the engine cannot answer yet."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.front.errors import ApiError


async def embeddings(request: Request) -> Response:
    """Refuse: the engine returns the sum of the hidden states before the final norm, and no others."""
    text = "embeddings are not implemented: the engine returns no hidden states after the final norm"
    raise ApiError(400, text, code="unsupported_route")
