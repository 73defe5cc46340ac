"""Tokens that llama.cpp recognises by their text if a file's keys and types do not identify them.

Source: llama.cpp b11549, src/llama-vocab.cpp, llama_vocab::impl::load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTROL = 3  # gguf.TokenType
#: ends of turns, texts and messages
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    "<｜end▁of▁sentence｜>",
}
#: of code that is filled in the middle
_FILL = {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
}


def looks_like_control(token: str) -> bool:
    """Return whether a token is treated as a control token regardless of its declared type."""
    return token in _ENDS or token in _FILL


#: tokenizer.ggml.model -> ids that llama.cpp uses if a file names none
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}


def named_id(fields: Mapping[str, Any], key: str) -> int | None:
    """tokenizer.ggml.<key>_token_id, or llama.cpp's default; None without either, or for no number."""
    default = DEFAULT_IDS.get(str(fields.get("tokenizer.ggml.model")), {}).get(key)
    found = fields.get(f"tokenizer.ggml.{key}_token_id", default)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """The ids that end a text, the one of eos_token_id first: those of keys, and control tokens by text."""
    named = [named_id(fields, key) for key in ("eos", "eot", "eom")]
    found = [number for number in named if number is not None]
    tokens, types = (fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types))
        found += [number for number, (token, kind) in pairs if kind == _CONTROL and token in _ENDS]
    return list(dict.fromkeys(found))
