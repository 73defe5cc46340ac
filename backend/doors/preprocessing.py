"""Model `preprocessing` of FasterTransformer's ensemble: texts in, token ids and word lists out.

Source: the FasterTransformer backend's preprocessing models. Kept: one text a row, no special tokens unless
add_special_tokens says so, no truncation, CSV word lists. The pad id is the tokenizer's end id. A query
without text gives a row of no tokens, which the fastertransformer model starts from its start id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tridecode.backend.doors.door import UnaryDoor
from tridecode.backend.doors.fields import TEXT, Field, Inputs, check_parameters, decode_text
from tridecode.backend.doors.word_lists import encode_words
from tridecode.backend.errors import RequestError

FIELDS = (
    Field("QUERY", TEXT, required=True),
    Field("REQUEST_OUTPUT_LEN", required=True),
    Field("BAD_WORDS_DICT", TEXT),
    Field("STOP_WORDS_DICT", TEXT),
)


class TritonPythonModel(UnaryDoor):
    def answer(self, arrays: Mapping[str, np.ndarray], parameters: str) -> dict[str, Any]:
        """INPUT_ID (B, Wmax), REQUEST_INPUT_LEN (B, 1), BAD_WORDS_IDS and STOP_WORDS_IDS (B, 2, P)."""
        check_parameters(parameters, FIELDS, self.settings.allowed_parameters)
        inputs = Inputs(arrays, FIELDS)
        queries = _first_column(inputs.arrays["QUERY"], "QUERY")
        ids = [self._encode(query, row) for row, query in enumerate(queries)]
        padded = np.full((len(ids), max(map(len, ids))), max(0, self.end_id), np.int64)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
        return {
            "INPUT_ID": padded,
            "REQUEST_INPUT_LEN": [[len(tokens)] for tokens in ids],
            "REQUEST_OUTPUT_LEN": inputs.arrays["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT", len(ids)),
            "STOP_WORDS_IDS": self._words(inputs, "STOP_WORDS_DICT", len(ids)),
        }

    def _encode(self, query: Any, row: int) -> list[int]:
        text = decode_text(query, "QUERY", row)
        return self.tokenizer.encode(text, add_special_tokens=self.settings.add_special_tokens).ids

    def _words(self, inputs: Inputs, name: str, batch: int) -> np.ndarray:
        if name not in inputs:
            return encode_words([b""] * batch, name, self.tokenizer)
        texts = _first_column(inputs.arrays[name], name)
        if len(texts) != batch:
            raise RequestError(f"{name} has {len(texts)} rows; QUERY has {batch}")
        return encode_words(texts, name, self.tokenizer)


def _first_column(array: np.ndarray, name: str) -> list:
    """The first text of each row; FasterTransformer reads no other."""
    if array.size == 0:
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted [B, 1]")
    return array.reshape(array.shape[0], -1)[:, 0].tolist()
