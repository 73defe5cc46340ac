"""/v1/embeddings: one vector for each text or list of token ids."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.base.errors import TridecodeError, UnsupportedError
from tridecode.backend.front.answering import Writer, answer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import bad_request, shown
from tridecode.backend.front.fields.embeddings import (
    ENCODINGS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.reading import Pieces
from tridecode.backend.front.routes.completions import read_prompts
from tridecode.backend.front.sampling import or_default, refuse_unsupported
from tridecode.backend.front.service import FrontService
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service.text_request import FieldNames, Prompt, TextRequest
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.sampling_params import POOLINGS, SamplingParams

NAMES = EmbeddingRequest.__struct_fields__
#: of one request; OpenAI's limit
MAX_INPUTS = 2048
#: bytes of the vectors of one request, as float32; numbers in JSON take five times as many
MAX_VECTOR_BYTES = 64 << 20
_FIELDS = FieldNames("input")
#: numbers that are encoded in the event loop's own thread: about 1 ms
_LIGHT_NUMBERS = 16_384
#: the share of the engine's slots and queue that one request takes at a time
_QUEUE_SHARE = 4


async def embeddings(request: Request) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "embd", EmbeddingRequest)
    try:
        silent = refuse_unsupported(wanted)
        name, adapter = front.model.find(wanted.model)
        limits = front.model.limits()
        _check_choices(wanted, limits)
        prompts = _read_inputs(wanted.input, limits)
        first, *more = _requests(front.model, wanted, prompts, adapter, limits)
        writer = EmbeddingsWriter(call, name, wanted, len(prompts) * limits.hidden_size > _LIGHT_NUMBERS)
    except Exception as error:
        raise front.failed(call, error, NAMES) from error
    return await answer(
        front,
        request,
        call,
        first,
        writer,
        streaming=False,
        timeout_s=wanted.timeout_s or 0.0,
        names=NAMES,
        silent=silent,
        more=more,
    )


def _check_choices(wanted: EmbeddingRequest, limits: Limits) -> None:
    for name, values in (("encoding_format", ENCODINGS), ("pooling", POOLINGS)):
        value = getattr(wanted, name)
        if value is not None and value not in values:
            raise bad_request(f"{name} is {shown(value)}; wanted {' or '.join(map(shown, values))}", name)
    if wanted.dimensions not in (None, limits.hidden_size):
        found = f"dimensions is {wanted.dimensions}; this model's vectors have {limits.hidden_size:,} numbers"
        raise UnsupportedError(f"{found} and cannot be shortened")


def _read_inputs(value: str | list, limits: Limits) -> list[Prompt]:
    """Return the prompts of `input`. Raises ApiError; sizes are checked before anything else."""
    is_list = isinstance(value, list) and bool(value) and type(value[0]) is not int
    count = len(value) if is_list else 1
    if count > MAX_INPUTS:
        raise bad_request(f"input has {count:,} items; wanted {MAX_INPUTS:,} at most", "input")
    size = count * limits.hidden_size * 4
    if size > MAX_VECTOR_BYTES:
        found = f"the vectors of {count:,} items of input have {size:,} bytes"
        raise bad_request(f"{found}; this service returns {MAX_VECTOR_BYTES:,} at most", "input")
    prompts = read_prompts(value, "input")
    for row, prompt in enumerate(prompts):
        if not prompt:
            where = f"input of row {row}" if len(prompts) > 1 else "input"
            raise bad_request(f"{where} is an empty text; wanted one character or more", "input")
    return prompts


def _requests(
    model: ServedModel, wanted: EmbeddingRequest, prompts: Sequence[Prompt], adapter: str, limits: Limits
) -> list[TextRequest]:
    """Return the requests that follow each other: one alone could fill the engine's queue."""
    keep, count = wanted.truncate_prompt_tokens or 0, len(prompts)
    whole = TextRequest(
        prompts=prompts,
        params=[SamplingParams(max_tokens=0, pooling=wanted.pooling or "last")] * count,
        stop_words=[()] * count,
        lora_names=[adapter] * count,
        priorities=[wanted.priority or 0] * count,
        streaming=False,
        exclude=True,
        keep_last=keep if keep >= 0 else limits.max_sequence_tokens,
        add_special_tokens=or_default(wanted.add_special_tokens, model.settings.add_special_tokens),
        names=_FIELDS,
    )
    model.texts.check_texts(whole, limits)
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            tokens = min(len(prompt), whole.keep_last or len(prompt))
            request_limits.check_length(tokens, 0, limits, whole.row_name(row), "")
    each = max(1, (limits.max_sequences + limits.max_queued_requests) // _QUEUE_SHARE)
    return [_some(whole, first, each) for first in range(0, count, each)]


def _some(whole: TextRequest, first: int, count: int) -> TextRequest:
    """Return the request of `count` texts from number `first` on."""
    lists = ("prompts", "params", "stop_words", "lora_names", "priorities")
    some = {name: getattr(whole, name)[first : first + count] for name in lists}
    return replace(whole, **some, first_row=first)


class EmbeddingsWriter(Writer):
    """The answer of /v1/embeddings. heavy: the vectors take long to encode."""

    def __init__(self, call: Call, name: str, wanted: EmbeddingRequest, heavy: bool):
        self._call, self._name, self.heavy = call, name, heavy
        self._base64 = wanted.encoding_format == "base64"
        self._normalize = wanted.normalize is not False
        self._vectors: list[np.ndarray] = []

    def take(self, pieces: Pieces) -> bytes:
        """Add the vectors of the next inputs, which come together."""
        for group in pieces:
            for _, piece in sorted(group.items()):
                if not piece.embedding:
                    raise TridecodeError(f"the engine has no vector for input of row {len(self._vectors)}")
                self._vectors.append(np.frombuffer(piece.embedding, "<f4"))
                self._call.prompt_tokens += piece.num_prompt_tokens
        self._call.first = 0.0  # no token was generated
        self._call.finishes.clear()
        return b""

    def end(self) -> bytes:
        return b""

    def whole(self) -> bytes:
        rows = [Embedding(index, self._encoded(vector)) for index, vector in enumerate(self._vectors)]
        usage = EmbeddingUsage(self._call.prompt_tokens, self._call.prompt_tokens)
        return msgspec.json.encode(EmbeddingList(rows, self._name, usage))

    def _encoded(self, vector: np.ndarray) -> list[float] | str:
        if self._normalize:
            length = np.linalg.norm(vector.astype(np.float64))
            vector = (vector / length if length else vector).astype("<f4")
        return base64.b64encode(vector.tobytes()).decode() if self._base64 else vector.tolist()
