"""Model `preprocessing` of TensorRT-LLM's ensemble: texts in, token ids, word lists and end ids out.

Source: preprocessing/1/model.py of TensorRT-LLM's inflight_batcher_llm. As in the original, words are the
elements of BAD_WORDS_DICT and STOP_WORDS_DICT, encoded without special tokens, and DECODER_INPUT_ID is the
pad id. Unlike the original, the pad id is the end id even if the tokenizer has a pad token, and a missing
word list becomes one element of padding instead of an empty tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_PREPROCESSING
from tridecode.backend.doors.door import UnaryDoor
from tridecode.backend.doors.requests import fields
from tridecode.backend.doors.requests.embedding_bias import bias_tensor, word_biases
from tridecode.backend.doors.requests.envelope import MAX_ROWS
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.doors.requests.word_lists import word_list_tensor
from tridecode.backend.service.limits import INT32_MAX, whole_number
from tridecode.backend.text.encoding import encode

_BIASES = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")


class TritonPythonModel(UnaryDoor):
    contract = TENSORRT_LLM_PREPROCESSING

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        """Return INPUT_ID (B, W), word lists (B, 2, P), EMBEDDING_BIAS (B, V) or (B, 0), and the others
        (B, 1).
        """
        texts = _texts(inputs)
        batch = len(texts)
        special = fields.add_special_tokens(inputs, self.settings.add_special_tokens)
        ids = list(encode(self.tokenizer, texts, special))
        width = max(map(len, ids))
        self.envelope.check_padded("QUERY", batch, width)
        end_ids = _token_ids(inputs, "END_ID", batch, self.end_id)
        pad_ids = _token_ids(inputs, "PAD_ID", batch, max(0, self.end_id))
        padded = np.empty((batch, width), np.int64)
        padded[:] = np.array(pad_ids)[:, None]
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
        return {
            "INPUT_ID": padded,
            "REQUEST_INPUT_LEN": [[len(tokens)] for tokens in ids],
            "DECODER_INPUT_ID": [[pad] for pad in pad_ids],
            "REQUEST_DECODER_INPUT_LEN": [[1]] * batch,
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT", batch),
            "STOP_WORDS_IDS": self._words(inputs, "STOP_WORDS_DICT", batch),
            "EMBEDDING_BIAS": self._biases(inputs, batch),
            "REQUEST_OUTPUT_LEN": inputs.arrays["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": [[end] for end in end_ids],
            "OUT_PAD_ID": [[pad] for pad in pad_ids],
        }

    def _biases(self, inputs: Inputs, batch: int) -> np.ndarray:
        rows, vocab_size = (
            word_biases(inputs, batch, self.tokenizer, _BIASES),
            self.tokenizer.get_vocab_size(),
        )
        if any(rows):
            self.envelope.check_padded(_BIASES[0], batch, vocab_size)
        return bias_tensor(rows, vocab_size)

    def _words(self, inputs: Inputs, name: str, batch: int) -> np.ndarray:
        """Return the non-empty words as [B, 2, P]; [n] or [1, n] has the words of all rows."""
        array = inputs.arrays.get(name)
        if array is None:
            return word_list_tensor([[]] * batch)
        rows = (
            array.reshape(1, -1)
            if array.ndim < 2
            else array.reshape(array.shape[0], math.prod(array.shape[1:]))
        )
        if rows.shape[0] not in (1, batch):
            raise RequestError(f"{name} has shape {list(array.shape)}; wanted [{batch}, n]")
        words = [[decode_text(word, name, row) for word in texts] for row, texts in enumerate(rows.tolist())]
        different = list(dict.fromkeys(word for texts in words for word in texts if word))
        ids = dict(zip(different, encode(self.tokenizer, different)))
        encoded = [[ids[word] for word in texts if ids.get(word)] for texts in words]
        if len(encoded) != batch:
            encoded *= batch
        self.envelope.check_padded(name, 2 * batch, max(sum(map(len, one)) for one in encoded))
        return word_list_tensor(encoded)


def _token_ids(inputs: Inputs, name: str, batch: int, default: int) -> list[int]:
    """Return one id per row that its INT32 output can hold.

    An id without a token, such as -1, is passed on.
    """
    values = inputs.rows(name, batch, default)
    return [whole_number(name, value, -INT32_MAX - 1, INT32_MAX, "a token id") for value in values]


def _texts(inputs: Inputs) -> list[str]:
    array = inputs.arrays["QUERY"]
    if array.size == 0 or array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise RequestError(f"QUERY has shape {list(array.shape)}; wanted [B, 1]")
    if array.size > MAX_ROWS:
        raise RequestError(f"QUERY has {array.size:,} rows; this model accepts {MAX_ROWS:,}")
    return [decode_text(value, "QUERY", row) for row, value in enumerate(array.reshape(-1).tolist())]
