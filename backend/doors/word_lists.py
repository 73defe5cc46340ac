"""FasterTransformer's lists of bad and stop words: CSV texts, token ids, and the [2, n] tensors between them.

Source: to_word_list_format of the FasterTransformer backend's preprocessing models and its ban_bad_words and
stop_criteria kernels (the tensor's meaning).
"""

from __future__ import annotations

import csv

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.doors.fields import decode_text
from tridecode.backend.errors import RequestError


def words_of_csv(text: str, name: str) -> list[str]:
    """The cells of the first CSV record, blanks kept, empty ones dropped. RequestError if it is no CSV."""
    try:
        record = next(csv.reader([text]), [])
    except csv.Error as error:
        raise RequestError(
            f'{name} is no line of CSV: {error}; wanted words with commas between, as in "a, b"'
        ) from None
    return [word for word in record if word]


def encode_words(texts: list, name: str, tokenizer: Tokenizer) -> np.ndarray:
    """The word lists of a batch as a tensor, int32 [B, 2, P], P the longest row's number of ids, at least 1.

    texts: one CSV text a row. Row 0 of a sequence has the ids of all its words, then 0; row 1 the ends of the
    words, then -1. A word that gives no ids is dropped. Raises RequestError.
    """
    rows = []
    for index, value in enumerate(texts):
        words = words_of_csv(decode_text(value, name, index), name)
        ids = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        rows.append([word_ids for word_ids in ids if word_ids])
    return word_list_tensor(rows)


def word_list_tensor(rows: list[list[list[int]]]) -> np.ndarray:
    width = max([1, *(sum(map(len, words)) for words in rows)])
    tensor = np.zeros((len(rows), 2, width), np.int32)
    tensor[:, 1] = -1
    for row, words in enumerate(rows):
        flat = [token for word in words for token in word]
        tensor[row, 0, : len(flat)] = flat
        tensor[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return tensor


def read_word_list(tensor: np.ndarray, batch: int, name: str, vocab_size: int) -> list[list[list[int]]]:
    """The words of each row of an int32 [B, 2, n] tensor, or of one [2, n] tensor for all rows.

    Offsets below 0 are padding. A word of no ids is passed over: in a stop list FasterTransformer stopped
    after one token for it, which the author of its own sample request did not want either. A word with an id
    beyond the vocabulary can never be said and is passed over too. RequestError for what cannot be read.
    """
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[1] != 2 or tensor.shape[0] not in (1, batch):
        raise RequestError(f"{name} has shape {list(tensor.shape)}; wanted [{batch}, 2, n]")
    rows = [_read_row(row, name, vocab_size) for row in tensor]
    return rows * batch if len(rows) == 1 else rows


def _read_row(row: np.ndarray, name: str, vocab_size: int) -> list[list[int]]:
    ids, width = row[0].tolist(), row.shape[1]
    words, start = [], 0
    for end in row[1].tolist():
        if end < 0:
            continue
        if end < start or end > width:
            found = f"{name} has the offset {end} after {start}"
            raise RequestError(f"{found}; wanted offsets that rise, up to its {width} ids")
        words.append(ids[start:end])
        start = end
    negative = [token for word in words for token in word if token < 0]
    if negative:
        raise RequestError(f"{name} has the token id {negative[0]}; wanted ids of 0 or more")
    return [word for word in words if word and max(word) < vocab_size]
