"""Computes the expected answer of a door with transformers from the request's arrays, greedily, row by row.

`expected` knows the fields that change greedy tokens. It returns None if a request samples or has a field
that it does not know; then only the shapes of the answer are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

#: fields that do not change which token is most likely, whatever their value
NEUTRAL = {
    *("runtime_top_p", "top_p", "temperature", "top_p_decay", "top_p_min", "top_p_reset_ids", "random_seed"),
    *("seed", "len_penalty", "length_penalty", "priority", "is_return_log_probs", "return_log_probs"),
    *("is_return_context_embeddings", "pad_id", "return_num_input_tokens", "return_num_output_tokens"),
    *("early_stopping", "lora_name", "runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids"),
    *("decoder_input_ids", "decoder_input_lengths", "draft_acceptance_threshold", "resume"),
    *("min_p", "typical_p", "cache", "cache_salt", "speculate", "draft_input_ids"),
}
MOST = 8  # tokens that are computed; a longer answer is compared as far
#: by the names of both contracts
_ALIASES = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "min_length": "min_tokens",
}


@dataclass
class Row:
    """A request's row: its prompt, and what changes greedy tokens."""

    prompt: list[int]
    max_tokens: int
    given: list[int] = field(default_factory=list)  # the prompt as sent; may be empty
    end_id: int = -1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    stop_words: list[list[int]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)


class Oracle:
    """Greedy tokens of a transformers model."""

    def __init__(self, model: torch.nn.Module, end_id: int):
        self.model, self.end_id, self.vocab_size = model, end_id, model.config.vocab_size
        self._logits = cache(self._forward)

    @torch.inference_mode()
    def _forward(self, ids: tuple[int, ...]) -> np.ndarray:
        return self.model(torch.tensor([ids])).logits[0, -1].double().numpy()

    def tokens(self, row: Row, most: int = MOST) -> list[int]:
        """In FasterTransformer's order: bad words and n-grams, penalties, min_tokens, then the most likely
        token.
        """
        found: list[int] = []
        while len(found) < min(row.max_tokens, most):
            history = row.prompt + found
            logits = self._logits(tuple(history)).copy()
            for word in row.bad_words:
                if word[:-1] == history[len(history) - len(word) + 1 :] or len(word) == 1:
                    logits[word[-1]] = -np.inf
            if size := row.no_repeat_ngram_size:
                for at in range(len(history) - size + 1):
                    if history[at : at + size - 1] == history[len(history) - size + 1 :]:
                        logits[history[at + size - 1]] = -np.inf
            seen, counts = np.unique(history, return_counts=True)
            penalty = row.repetition_penalty
            logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
            logits[seen] -= row.presence_penalty + row.frequency_penalty * counts
            if len(found) < row.min_tokens and row.end_id >= 0:
                logits[row.end_id] = -np.inf
            found.append(int(logits.argmax()))
            if found[-1] == row.end_id or any(
                (row.prompt + found)[-len(word) :] == word for word in row.stop_words
            ):
                break
        return found


def token_rows(arrays: Mapping[str, np.ndarray], oracle: Oracle) -> list[Row] | None:
    """The rows of a request to `fastertransformer`; None if it has a field that the oracle does not know."""
    known = {"input_ids", "input_lengths", "end_id", "start_id", "stop_words_list", "bad_words_list"}
    values = _values(arrays, known, len(np.atleast_2d(arrays["input_ids"])))
    if values is None:
        return None
    ids = np.atleast_2d(arrays["input_ids"]).astype(np.int64)
    rows = []
    for index, prompt in enumerate(ids):
        length = _value(arrays, "input_lengths", index, len(prompt))
        start = _value(arrays, "start_id", index, oracle.end_id)
        given = prompt[:length].tolist()
        row = Row(given or [start], given=given, **values[index])
        row.end_id = _end(arrays, index, oracle)
        row.stop_words = _words(arrays, "stop_words_list", index, oracle.vocab_size)
        row.bad_words = _words(arrays, "bad_words_list", index, oracle.vocab_size)
        rows.append(row)
    return rows


def text_rows(arrays: Mapping[str, np.ndarray], oracle: Oracle, encode) -> list[Row] | None:
    """The rows of a request to the text model without words."""
    texts = arrays["text_input"].reshape(-1)
    values = _values(arrays, {"text_input", "end_id", "exclude_input_in_output", "stream"}, len(texts))
    if values is None or _any(arrays, "stream"):
        return None
    rows = []
    for index, text in enumerate(texts):
        row = Row(encode(bytes(text).decode()) or [oracle.end_id], **values[index])
        row.end_id = _end(arrays, index, oracle)
        rows.append(row)
    return rows


#: fields that are known at one value
OFF = {"beam_width": 1, "beam_search_diversity_rate": 0.0}
_NUMBERS = {
    *("max_tokens", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "no_repeat_ngram_size",
}


def _values(arrays: Mapping[str, np.ndarray], known: set[str], rows: int) -> list[dict] | None:
    found: list[dict] = [{} for _ in range(rows)]
    for name, array in arrays.items():
        param = _ALIASES.get(name, name)
        if array.size == 0 and param in _NUMBERS:
            return None
        if param in _NUMBERS:
            for index in range(rows):
                found[index][param] = _value(arrays, name, index, 0)
        elif param == "top_k":
            if any(_value(arrays, name, index, 1) != 1 for index in range(rows)):
                return None
        elif name in OFF:
            if any(value != OFF[name] for value in array.reshape(-1).tolist()):
                return None
        elif name not in known and name not in NEUTRAL:
            return None
    return found


def _value(arrays: Mapping[str, np.ndarray], name: str, row: int, default):
    array = arrays.get(name)
    if array is None:
        return default
    flat = array.reshape(-1).tolist()
    return flat[row if len(flat) > 1 else 0]


def _any(arrays: Mapping[str, np.ndarray], name: str) -> bool:
    return name in arrays and bool(arrays[name].any())


def _end(arrays: Mapping[str, np.ndarray], row: int, oracle: Oracle) -> int:
    end = _value(arrays, "end_id", row, oracle.end_id)
    return end if 0 <= end < oracle.vocab_size else -1


def _words(arrays: Mapping[str, np.ndarray], name: str, row: int, vocab_size: int) -> list[list[int]]:
    """Offsets of row 1 end the words in row 0; -1 is padding. Words that cannot occur are left out."""
    array = arrays.get(name)
    if array is None or array.size == 0:
        return []
    ids, ends = (array if array.ndim == 2 else array[min(row, len(array) - 1)]).tolist()
    words, start = [], 0
    for end in (end for end in ends if end >= 0):
        words.append(ids[start:end])
        start = end
    return [word for word in words if word and max(word) < vocab_size]
