"""Converts FasterTransformer's lists of bad and stop words: CSV texts, token ids and [2, n] tensors.

Source: to_word_list_format of the FasterTransformer backend's preprocessing models and its ban_bad_words and
stop_criteria kernels (the tensor's meaning).
"""

from __future__ import annotations

import csv

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.requests.envelope import MAX_REQUEST_WORDS
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.service.limits import MAX_WORDS, check_word_tokens
from tridecode.backend.text.encoding import encode
from tridecode.backend.wire.messages import Limits


def words_of_csv(text: str, name: str) -> list[str]:
    """Return the non-empty cells of the first CSV record; spaces are kept.

    Raises RequestError if it is not CSV.
    """
    try:
        record = next(csv.reader([text]), [])
    except csv.Error as error:
        lines = len(text.splitlines())
        found = f"has {lines:,} lines" if lines > 1 else f"is not a valid line of CSV ({error})"
        raise RequestError(
            f'{name} {found}; wanted one line of words separated by commas, as in "a, b"'
        ) from None
    return [word for word in record if word]


def encode_words(texts: list, name: str, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Return the ids of each row's words. texts: one CSV text per row. Words without ids are dropped.

    Raises RequestError if a text is not valid or has too many words.
    """
    rows = [words_of_csv(decode_text(value, name, row), name) for row, value in enumerate(texts)]
    for row, words in enumerate(rows):
        if len(words) > MAX_WORDS:
            raise RequestError(
                f"{name} of row {row} has {len(words):,} words; this model accepts {MAX_WORDS:,}"
            )
    different = list({word: None for words in rows for word in words})
    if len(different) > MAX_REQUEST_WORDS:
        most = f"{MAX_REQUEST_WORDS:,} in a request"
        raise RequestError(f"{name} has {len(different):,} words; this model accepts {most}")
    ids = dict(zip(different, encode(tokenizer, different)))
    return [[ids[word] for word in words if ids[word]] for words in rows]


def word_list_tensor(rows: list[list[list[int]]]) -> np.ndarray:
    """Return the word lists of a batch as int32 [B, 2, P], P the longest row's number of ids, at least 1.

    Row 0 of a sequence holds the ids of all its words, padded with 0; row 1 the end offset of each word,
    padded with -1.
    """
    width = max([1, *(sum(map(len, words)) for words in rows)])
    tensor = np.zeros((len(rows), 2, width), np.int32)
    tensor[:, 1] = -1
    for row, words in enumerate(rows):
        flat = [token for word in words for token in word]
        tensor[row, 0, : len(flat)] = flat
        tensor[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return tensor


def read_word_list(tensor: np.ndarray, batch: int, name: str, vocab_size: int) -> list[list[list[int]]]:
    """Return the words of each row of an int32 [B, 2, n] tensor, or of one [2, n] tensor for all rows.

    Offsets below 0 are padding. A word without ids is ignored: in a stop list, FasterTransformer ended the
    row after one token, which even its own sample request did not intend. A word with an id beyond the
    vocabulary is also ignored, because it can never be generated. Raises RequestError if the tensor is
    malformed.
    """
    sent = list(tensor.shape)
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[1] != 2 or tensor.shape[0] not in (1, batch):
        raise RequestError(f"{name} has shape {sent}; wanted [{batch}, 2, n]")
    rows = [_read_row(row, name, vocab_size) for row in tensor]
    return rows * batch if len(rows) == 1 else rows


def _read_row(row: np.ndarray, name: str, vocab_size: int) -> list[list[int]]:
    ids, width = row[0], row.shape[1]
    ends = row[1][row[1] >= 0].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    wrong = np.flatnonzero((ends < starts) | (ends > width))
    if wrong.size:
        found = f"{name} has the offset {ends[wrong[0]]} after {starts[wrong[0]]}"
        raise RequestError(f"{found}; wanted ascending offsets of 0 to {width}, its number of ids")
    used = ids[: ends[-1]] if ends.size else ids[:0]
    if used.size and used.min() < 0:
        raise RequestError(f"{name} has the token id {used[used < 0][0]}; wanted ids of 0 or more")
    words = [ids[start:end].tolist() for start, end in zip(starts, ends) if start < end]
    return [word for word in words if max(word) < vocab_size]


def read_words(inputs: Inputs, name: str, batch: int, limits: Limits, limit: int) -> list[list[list[int]]]:
    """Return the ids of each row's words in the [batch, 2, n] tensor `name`; none if the request lacks it.

    Raises RequestError like read_word_list, and if the words of a row have more than `limit` tokens.
    """
    if name not in inputs:
        return [[]] * batch
    rows = read_word_list(inputs.arrays[name], batch, name, limits.vocab_size)
    for words in rows:
        check_word_tokens(name, words, limit)
    return rows
