"""/v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tridecode.backend.front.fields.sampling import INT32_MAX
from tridecode.backend.wire.sampling_params import POOLINGS

ENCODINGS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """input: a text, a list of texts, token ids, or a list of lists of token ids. OpenAI's fields, then ours.

    dimensions: only the model's own number. pooling: the hidden state of the last token, or the mean over
    the tokens. normalize: scale each vector to length 1; true by default.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Annotated[str, Meta(extra_json_schema={"enum": [*ENCODINGS]})] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None

    pooling: Annotated[str, Meta(extra_json_schema={"enum": [*POOLINGS]})] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    add_special_tokens: bool | None = None
    priority: (
        Annotated[int, Meta(ge=-INT32_MAX - 1, le=INT32_MAX, description="smaller is sooner")] | None
    ) = None
    timeout_s: Annotated[float, Meta(gt=0.0, description="deadline, in seconds")] | None = None
    request_id: str | None = None

    # accepted without effect: see NO_EFFECT
    user: Any = None


class Embedding(msgspec.Struct):
    """embedding: numbers, or the bytes of little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
