"""Model `preprocessing` of FasterTransformer's ensemble: texts in, token ids and word lists out.

Source: the FasterTransformer backend's preprocessing models. As in the original: one text per row, no special
tokens unless add_special_tokens is set, in config.pbtxt or by the request, no truncation, CSV word lists. The
pad id is the tokenizer's end id. An empty query becomes a row without tokens, which the fastertransformer
model starts from its start id.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.ensemble import PREPROCESSING
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.door import UnaryDoor
from tridecode.backend.doors.requests import fields
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.doors.requests.word_lists import encode_words, word_list_tensor
from tridecode.backend.text.encoding import encode


class TritonPythonModel(UnaryDoor):
    contract = PREPROCESSING

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        """INPUT_ID (B, Wmax), REQUEST_INPUT_LEN (B, 1), BAD_WORDS_IDS and STOP_WORDS_IDS (B, 2, P)."""
        queries = _first_column(inputs.arrays["QUERY"], "QUERY")
        texts = [decode_text(query, "QUERY", row) for row, query in enumerate(queries)]
        special = fields.add_special_tokens(inputs, self.settings.add_special_tokens)
        ids = list(encode(self.tokenizer, texts, special))
        width = max(map(len, ids))
        self.envelope.check_padded("QUERY", len(ids), width)
        padded = np.full((len(ids), width), max(0, self.end_id), np.int64)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
        return {
            "INPUT_ID": padded,
            "REQUEST_INPUT_LEN": [[len(tokens)] for tokens in ids],
            "REQUEST_OUTPUT_LEN": inputs.arrays["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT", len(ids)),
            "STOP_WORDS_IDS": self._words(inputs, "STOP_WORDS_DICT", len(ids)),
        }

    def _words(self, inputs: Inputs, name: str, batch: int) -> np.ndarray:
        if name not in inputs:
            return word_list_tensor([[]] * batch)
        texts = _first_column(inputs.arrays[name], name)
        if len(texts) != batch:
            found = f"{name} has shape {list(inputs.arrays[name].shape)}"
            raise RequestError(f"{found}; wanted [{batch}, 1], a text for each of the {batch} rows of QUERY")
        rows = encode_words(texts, name, self.tokenizer)
        self.envelope.check_padded(name, 2 * batch, max(sum(map(len, words)) for words in rows))
        return word_list_tensor(rows)


def _first_column(array: np.ndarray, name: str) -> list:
    """Return the first text of each row; FasterTransformer ignores the others."""
    if array.size == 0 or array.ndim == 0:
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted [B, 1]")
    return array.reshape(array.shape[0], -1)[:, 0].tolist()
