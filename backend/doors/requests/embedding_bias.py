"""Biases of token ids, as TensorRT-LLM's models take them: words with weights, or a number for every id.

Source: _get_embedding_bias of TensorRT-LLM's preprocessing model. The weight of a word is added to the bias
of each of its tokens. Unlike the original, a word is encoded without special tokens, so that no word biases
the BOS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.text.encoding import encode
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.sampling_params import MAX_BIAS, MAX_BIASES

#: the two inputs of a text model
WORDS = ("embedding_bias_words", "embedding_bias_weights")

Biases = dict[int, float]


def word_biases(
    inputs: Inputs, batch: int, tokenizer: Tokenizer, names: tuple[str, str] = WORDS
) -> list[Biases]:
    """Return SamplingParams.logit_bias of each row. Accepted shapes of both inputs: [B, n], or [n] for all.

    Empty words have no effect. Raises RequestError that names the input.
    """
    words, weights = (inputs.arrays.get(name) for name in names)
    if words is None and weights is None:
        return [{}] * batch
    texts = [] if words is None else _rows(words, names[0], batch)
    numbers = [] if weights is None else _rows(weights, names[1], batch)
    for name, other, sent in ((names[0], names[1], texts), (names[1], names[0], numbers)):
        if not sent:
            if any(value not in (0.0, b"") for row in texts + numbers for value in row):
                raise RequestError(f"{other} was sent without {name}; wanted both, of one shape")
            return [{}] * batch
    pairs = [
        _pairs(texts[row % len(texts)], numbers[row % len(numbers)], names, row)
        for row in range(max(len(texts), len(numbers)))
    ]
    different = list(dict.fromkeys(word for row in pairs for word, _ in row))
    ids = dict(zip(different, encode(tokenizer, different)))
    found = [_summed([(token, weight) for word, weight in row for token in ids[word]]) for row in pairs]
    for biases in found:
        _check_count(len(biases), f"the words of {names[0]} have {len(biases):,} different tokens per row")
    return found if len(found) == batch else found * batch


def _rows(array: np.ndarray, name: str, batch: int) -> list[list]:
    """Return the values of each row; one row for all."""
    rows = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), math.prod(array.shape[1:]))
    if len(rows) not in (1, batch):
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted [{batch}, n]")
    return rows.tolist()


def _pairs(
    words: Sequence[bytes], weights: Sequence[float], names: tuple[str, str], row: int
) -> list[tuple[str, float]]:
    """Return the words that are not empty, with their weights."""
    if len(words) != len(weights):
        found = f"{names[0]} has {len(words):,} words and {names[1]} has {len(weights):,} numbers"
        raise RequestError(f"{found} for row {row}; wanted one number for each word")
    wrong = next((weight for weight in weights if not abs(weight) <= MAX_BIAS), None)
    if wrong is not None:  # NaN, too
        raise RequestError(f"{names[1]} of row {row} has {wrong}; wanted a number from -1e9 to 1e9")
    texts = [decode_text(word, names[0], row) for word in words]
    return [(text, weight) for text, weight in zip(texts, weights) if text]


def _summed(pairs: Sequence[tuple[int, float]]) -> Biases:
    found: Biases = {}
    for token, weight in pairs:
        found[token] = min(max(found.get(token, 0.0) + weight, -MAX_BIAS), MAX_BIAS)
    return {token: bias for token, bias in found.items() if bias}


def _check_count(count: int, found: str) -> None:
    if count > MAX_BIASES:
        raise RequestError(f"{found}; this model accepts {MAX_BIASES:,}")


def bias_tensor(rows: Sequence[Biases], vocab_size: int) -> np.ndarray:
    """Return embedding_bias of `tensorrt_llm`, float32 (B, vocab_size), or (B, 0) without biases."""
    found = np.zeros((len(rows), vocab_size if any(rows) else 0), np.float32)
    for row, biases in zip(found, rows):
        for token, bias in biases.items():
            row[token] = bias
    return found


def tensor_biases(inputs: Inputs, batch: int, limits: Limits, name: str = "embedding_bias") -> list[Biases]:
    """Return SamplingParams.logit_bias of each row from numbers for the ids from 0 on: [B, n], or [n] for all
    rows. Raises RequestError that names the input.
    """
    array = inputs.arrays.get(name)
    if array is None or array.size == 0:
        return [{}] * batch
    rows = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), math.prod(array.shape[1:]))
    if len(rows) not in (1, batch) or rows[:, limits.vocab_size :].any():
        wanted = f"[{batch}, n], n at most {limits.vocab_size:,}"
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted {wanted}")
    rows = rows[:, : limits.vocab_size]
    for row, column in np.argwhere(~(np.abs(rows.astype(np.float64)) <= MAX_BIAS))[:1]:
        found = f"{name} of row {row} is {rows[row, column]} for token id {column}"
        raise RequestError(f"{found}; wanted a number from -1e9 to 1e9")
    biases = []
    for row, values in enumerate(rows):
        ids = np.flatnonzero(values)
        _check_count(len(ids), f"{name} of row {row} has {len(ids):,} numbers other than 0")
        biases.append(dict(zip(ids.tolist(), values[ids].tolist())))
    return biases if len(biases) == batch else biases * batch
