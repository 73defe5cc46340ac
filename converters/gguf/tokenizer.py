"""Rebuilds the tokenizer of a GGUF file with the tokenizers library, so that it behaves as in llama.cpp.

transformers' own reader does not know the rules of each pre-tokenizer name (pre_tokenizers.py), nor most of
the keys. Here every key of tokenizer.ggml is read, listed as having no effect, or refused.
Source: llama.cpp b11549, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from tridecode.converters.gguf.special_tokens import looks_like_control, named_id

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # gguf.TokenType
_SPACE = "▁"
#: the two values of tokenizer.ggml.model that are supported
_BPE, _SENTENCEPIECE = "gpt2", "llama"
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"),
    "add_space_prefix",
}
#: keys that llama.cpp reads only for other tokenizers, or while it generates or formats text
_WITHOUT_EFFECT = {
    *("token_type_count", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"),
    *("suppress_tokens", "added_tokens", "normalizer.lowercase", "normalizer.strip_accents"),
}


def is_tokenizer(kind: object) -> bool:
    """Return whether a value of tokenizer.ggml.model names a tokenizer."""
    return kind not in (None, "none", "no_vocab")


def load_gguf_tokenizer(fields: Mapping[str, Any], path: Path) -> PreTrainedTokenizerBase:
    """Build the tokenizer from the metadata of a GGUF file. path: the file, for errors.

    Raises UnsupportedError for a kind of tokenizer, pre-tokenizer or key that cannot be rebuilt,
    CheckpointError for damaged metadata.
    """
    kind, held = fields.get(f"{_PREFIX}model"), _Vocabulary(fields, path)
    _refuse_unknown_keys(fields, path)
    if kind == _BPE:
        tokenizer, default_bos = _byte_level(held, fields, path)
    elif kind == _SENTENCEPIECE:
        tokenizer, default_bos = _sentencepiece(held, fields, path), True
    else:
        raise UnsupportedError(
            f"{path} has tokenizer.ggml.model = {str(kind)[:40]!r}; this version reads {_BPE} and "
            f"{_SENTENCEPIECE}: name the folder of the original tokenizer (--tokenizer)"
        )
    _add_special_tokens(tokenizer, held, str(fields.get("general.name", "")))
    special = {name: held.special(key) for key, name in _SPECIAL.items()}
    bos = _added(fields, "add_bos_token", default_bos, special["bos_token"], path)
    eos = _added(fields, "add_eos_token", False, special["eos_token"], path)
    if bos or eos:
        parts = [part for part in (bos, "$A", eos) if part]
        ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    named = {name: token for name, token in special.items() if token is not None}
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        named["chat_template"] = template
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    made.name_or_path = str(path)  # identifies the tokenizer in the comparison
    return made


def tokenizer_notes(fields: Mapping[str, Any]) -> list[str]:
    """Return notes for the user on guesses, and on keys that are ignored."""
    notes = []
    if fields.get(f"{_PREFIX}model") == _BPE and f"{_PREFIX}pre" not in fields:
        notes.append(
            "the file has no tokenizer.ggml.pre: texts are split as llama.cpp does without it, "
            "which the model was not trained with; name the folder of the original tokenizer (--tokenizer)"
        )
    unread = sorted(key for key in _unknown_keys(fields) if key.endswith("_token_id"))
    if unread:
        notes.append(f"keys of the tokenizer that are not read: {', '.join(unread)[:200]}")
    return notes


class _Vocabulary:
    """Tokens, their types and scores. Raises CheckpointError if the arrays differ in length."""

    def __init__(self, fields: Mapping[str, Any], path: Path):
        self._fields, self._path = fields, path
        self.tokens = [
            token or f"[EMPTY_{number}]" for number, token in enumerate(self.array("tokens", str, None))
        ]
        size = len(self.tokens)
        self.types = self.array("token_type", int, size) or [1] * size
        self.scores = self.array("scores", (int, float), size) or [0.0] * size
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != size:
            twice = next(token for number, token in enumerate(self.tokens) if self.ids[token] != number)
            raise CheckpointError(f"{path} has the token {twice[:80]!r} twice in tokenizer.ggml.tokens")

    def array(self, key: str, kind: Any, size: int | None) -> list[Any]:
        """Return an array of the metadata; empty if it is absent, which is an error only for `tokens`."""
        found = self._fields.get(f"{_PREFIX}{key}")
        if found is None and key != "tokens":
            return []
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            wanted = f"wanted an array of {'texts' if kind is str else 'numbers'}"
            raise CheckpointError(f"{self._path} has tokenizer.ggml.{key} = {str(found)[:40]}; {wanted}")
        if size is not None and len(found) < size:
            raise CheckpointError(
                f"{self._path} has {len(found):,} entries in tokenizer.ggml.{key}; wanted {size:,}"
            )
        return found

    def special(self, key: str) -> str | None:
        """Return the token of tokenizer.ggml.<key>_token_id; None for an id outside the vocabulary."""
        number = named_id(self._fields, key)
        return None if number is None or not 0 <= number < len(self.tokens) else self.tokens[number]


def _byte_level(held: _Vocabulary, fields: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    """Build a byte-level BPE; also return whether BOS is added by default."""
    rules = _pre_tokenizer(fields, path)
    merges = [_pair(merge) for merge in held.array("merges", str, None)]
    if not merges:
        raise CheckpointError(f"{path} has no tokenizer.ggml.merges")
    try:
        model = models.BPE(held.ids, merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: the merges do not fit the vocabulary: {error}") from None
    tokenizer = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _pre_tokenizer(fields: Mapping[str, Any], path: Path) -> PreTokenizer:
    name = fields.get(f"{_PREFIX}pre") or DEFAULT
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{path} has tokenizer.ggml.pre = {str(name)[:40]}, which cannot be rebuilt; name the folder of "
            "the original tokenizer (--tokenizer)"
        )
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge at its space into two tokens; the first may itself begin with a space."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else ("", "")


def _sentencepiece(held: _Vocabulary, fields: Mapping[str, Any], path: Path) -> Tokenizer:
    """Build sentencepiece's BPE, whose merges follow from the scores of the tokens."""
    scores = dict(zip(held.tokens, map(float, held.scores)))
    unknown = held.special("unknown")
    model = models.BPE(
        held.ids, generate_merges(held.ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _switch(fields, "add_space_prefix", True, path):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, held: _Vocabulary, name: str) -> None:
    """Add the tokens that are matched in a text before it is split."""
    is_phi3 = any(part in name.lower() for part in ("phi-3", "phi3"))
    added = []
    for token, kind in zip(held.tokens, held.types):
        is_special = kind in (_UNKNOWN, _CONTROL) or looks_like_control(token)
        if not is_special and kind != _USER_DEFINED:
            continue
        rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        added.append(AddedToken(token, normalized=False, special=is_special, rstrip=rstrip))
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _switch(fields: Mapping[str, Any], key: str, default: bool, path: Path) -> bool:
    found = fields.get(f"{_PREFIX}{key}", default)
    if not isinstance(found, bool):
        raise CheckpointError(f"{path} has tokenizer.ggml.{key} = {str(found)[:40]}; wanted true or false")
    return found


def _added(fields: Mapping[str, Any], key: str, default: bool, token: str | None, path: Path) -> str | None:
    """Return the token that is added before or after each text, or None."""
    if not _switch(fields, key, default, path):
        return None
    if token is None:
        raise CheckpointError(
            f"{path} adds a token to each text ({key}, or the rules of tokenizer.ggml.pre), but its "
            f"vocabulary has none: {key.split('_')[1]}_token_id is missing or out of range"
        )
    return token


def _unknown_keys(fields: Mapping[str, Any]) -> Sequence[str]:
    known = _READ | _WITHOUT_EFFECT | {f"{key}_token_id" for key in _SPECIAL} | _END_AND_FILL_IDS
    keys = (key.removeprefix(_PREFIX) for key in fields if key.startswith(_PREFIX))
    return [key for key in keys if key not in known]


#: ids of tokens that end a text, or that only prompts use
_END_AND_FILL_IDS = {
    f"{name}_token_id"
    for name in (
        *("eot", "eom", "seperator", "separator", "mask", "cls", "prefix", "suffix", "middle"),
        *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    )
}


def _refuse_unknown_keys(fields: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedError for a key that may change how text is split; token ids cannot."""
    for key in _unknown_keys(fields):
        if not key.endswith("_token_id"):
            raise UnsupportedError(
                f"{path} has {_PREFIX}{key[:80]}, which this version does not know and which may change how "
                "texts are split; name the folder of the original tokenizer (--tokenizer)"
            )
