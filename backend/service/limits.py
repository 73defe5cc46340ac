"""Request limits that apply to every front end: texts, words, lengths, counts.

Checks look at sizes only, so their cost does not depend on the content. docs/reference/requests.md lists the
limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tridecode.backend.base.errors import ContextLengthError, RequestError
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.sampling_params import SamplingParams

MAX_WORDS = 1024  # bad or stop words of one row, unless the engine's limit in tokens is higher
MAX_REQUEST_WORD_BYTES = 262_144  # bad or stop words of all rows
MAX_STOP_WORDS = 256  # stop words of one row, which are matched in the text
MAX_STOP_WORD_BYTES = 4096
MAX_LABEL = 1024  # characters of a request id
MAX_TIMEOUT_S = 30 * 86_400.0  # longer time-outs count as this
INT32_MAX = 2**31 - 1

#: ordinary text has 4 to 5 bytes per token, source code with its runs of spaces up to 16
BYTES_A_TOKEN = 32
#: Measured with GPT-2's and SmolLM2's tokenizers: 2.5 MB/s, so this takes 25 ms
_MIN_PROMPT_BYTES = 65_536
_MIN_REQUEST_BYTES = 4_194_304
#: max_sequence_tokens of a front end without an engine (preprocessing)
_UNKNOWN_SEQUENCE_TOKENS = 32_768
_MIN_WORD_BYTES = 16_384
_LOGIT_BYTES = 4  # float32


@dataclass(frozen=True)
class TextLimits:
    """The limits of the texts of a request, in bytes of UTF-8."""

    max_prompt_bytes: int  # bytes of one text
    max_request_bytes: int  # bytes of all texts of a request
    max_sequence_tokens: int  # tokens of the longest row
    max_words: int
    max_word_bytes: int  # bytes of the words of one row

    def check_total(self, total: int) -> None:
        """Raise RequestError if the texts of a request have too many bytes."""
        if total > self.max_request_bytes:
            most = f"{self.max_request_bytes:,} (max_request_bytes in config.pbtxt)"
            raise too_large(f"the request has {total:,} bytes of text", most)

    def check_prompt(self, where: str, size: int) -> None:
        """Raise RequestError if one text has too many bytes.

        where: its field, and its row if there are several.
        """
        if size > self.max_prompt_bytes:
            most = f"{self.max_prompt_bytes:,} (max_prompt_bytes in config.pbtxt)"
            raise too_large(f"{where} has {size:,} bytes", most)

    def check_words(self, name: str, count: int, row_bytes: int, total: int) -> None:
        """Raise RequestError for too many words.

        count, row_bytes: those of the longest row; total: bytes of all rows.
        """
        if count > self.max_words:
            raise too_large(f"{name} has {count:,} words a row", f"{self.max_words:,}")
        if row_bytes > self.max_word_bytes:
            raise too_large(f"{name} has {row_bytes:,} bytes a row", f"{self.max_word_bytes:,}")
        if total > MAX_REQUEST_WORD_BYTES:
            raise too_large(f"{name} has {total:,} bytes", f"{MAX_REQUEST_WORD_BYTES:,} in a request")


def text_limits(
    limits: Limits | None, max_prompt_bytes: int | None = None, max_request_bytes: int | None = None
) -> TextLimits:
    """Return the given limits; those that are None are derived from the engine's."""
    tokens = limits.max_sequence_tokens if limits else _UNKNOWN_SEQUENCE_TOKENS
    word_tokens = max(limits.max_bad_word_tokens, limits.max_stop_word_tokens) if limits else 0
    prompt = max_prompt_bytes or max(_MIN_PROMPT_BYTES, BYTES_A_TOKEN * tokens)
    return TextLimits(
        max_prompt_bytes=prompt,
        max_request_bytes=max_request_bytes or max(_MIN_REQUEST_BYTES, 8 * prompt),
        max_sequence_tokens=tokens,
        max_words=max(MAX_WORDS, word_tokens),
        max_word_bytes=max(_MIN_WORD_BYTES, BYTES_A_TOKEN * word_tokens),
    )


def too_large(found: str, most: str) -> RequestError:
    return RequestError(f"{found}; this model accepts {most}")


def check_label(label: str) -> str:
    if len(label) > MAX_LABEL:
        raise too_large(f"the request id has {len(label):,} characters", f"{MAX_LABEL:,}")
    try:
        label.encode("utf-8")  # JSON can hold lone surrogates, which cannot be encoded
    except UnicodeEncodeError:
        raise RequestError("the request id is not valid UTF-8 text") from None
    return label


def whole_number(name: str, value: Any, low: int, high: int, meaning: str) -> int:
    """Return `value` as an integer from low to high; texts are accepted, since JSON parameters often are
    texts.
    """
    try:
        if isinstance(value, bool) or (isinstance(value, str) and len(value) > 20):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        number = high + 1
    if not low <= number <= high:
        text = value if isinstance(value, (int, float)) else repr(value)
        shown = str(text) if len(str(text)) <= 60 else str(text)[:57] + "..."
        raise RequestError(f"{name} is {shown}; wanted a whole number from {low} to {high}, {meaning}")
    return number


def check_sequences(count: int, limits: Limits) -> None:
    """Raise RequestError if even an idle engine cannot hold `count` sequences of one request."""
    most = limits.max_sequences + limits.max_queued_requests
    if count > most:
        found = f"the request has {count:,} sequences (rows and their beams or samples)"
        wanted = f"{most:,} (max_sequences and max_queued_requests in config.pbtxt)"
        raise RequestError(f"{found}; this model accepts {wanted}")


def check_length(prompt: int, output: int, limits: Limits, prompt_name: str, output_name: str) -> None:
    """Raise RequestError if prompt and output, in tokens, do not fit into a sequence."""
    if prompt + output > limits.max_sequence_tokens:
        found, most = f"{prompt_name} has {prompt:,} tokens", f"{limits.max_sequence_tokens:,}"
        if output:
            found, most = f"{found} and {output_name} asks for {output:,} more", f"{most} in all"
        raise ContextLengthError(f"{found}; this model accepts {most} (max_sequence_tokens in config.pbtxt)")


def cut_to_room(
    prompt: int, params: SamplingParams, limits: Limits, prompt_name: str, output_name: str
) -> SamplingParams:
    """Return the parameters with max_tokens cut to the room after the prompt.

    Raises RequestError if there is none.
    """
    room = limits.max_sequence_tokens - prompt
    if room < 1:
        check_length(prompt, 1, limits, prompt_name, output_name)
    if params.max_tokens <= room:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def check_word_tokens(name: str, words: list[list[int]], limit: int) -> None:
    """Raise RequestError if the ids of a sequence's words together exceed the engine's limit."""
    count = sum(map(len, words))
    if count > limit:
        setting = "max_bad_word_tokens" if "bad" in name.lower() else "max_stop_word_tokens"
        most = f"{limit:,} in all words of a row ({setting} in config.pbtxt)"
        raise RequestError(f"{name} has {count:,} token ids; this model accepts {most}")


def check_stop_words(words: Sequence[str], name: str) -> None:
    """Raise RequestError if the stop words of one row are too many, or too long in total."""
    size = sum(len(word.encode("utf-8")) for word in words)
    if len(words) > MAX_STOP_WORDS or size > MAX_STOP_WORD_BYTES:
        found = f"{name} has {len(words):,} words of {size:,} bytes a row"
        raise RequestError(
            f"{found}; this model accepts {MAX_STOP_WORDS} words, and {MAX_STOP_WORD_BYTES:,} bytes"
        )


def check_logits(
    context: bool,
    generation: bool,
    prompts: Sequence[int],
    counts: Sequence[int],
    limits: Limits,
    context_name: str = "return_context_logits",
) -> None:
    """Raise RequestError if the logits, padded to the longest row, exceed the engine's limit in bytes.

    context, generation: whether logits of prompts and of new tokens are requested. prompts, counts: for each
    row the tokens of its prompt and the maximum number of new tokens. context_name: the client's field.
    """
    width = (max(prompts) if context else 0) + (max(counts) if generation else 0)
    size = len(prompts) * width * limits.vocab_size * _LOGIT_BYTES
    if size > limits.max_logits_bytes:
        names = [context_name] * context + ["return_generation_logits"] * generation
        raise RequestError(
            f"{' and '.join(names)}: {len(prompts):,} rows of {width:,} tokens have {size:,} bytes of "
            f"logits; this model accepts {limits.max_logits_bytes:,} (max_logits_bytes in config.pbtxt)"
        )
