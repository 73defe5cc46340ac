"""Compares the vocabularies of two tokenizers, for a draft model that proposes the target's token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.text.tokenizer_files import load_tokenizer


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer's pieces, merges and added tokens with their ids, in hexadecimal.

    Other settings, such as templates and the classes of added tokens, do not change the meaning of an id.
    """
    facts = json.dumps(_facts(tokenizer), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def check_same_vocabulary(draft: Path, target: Path, setting: str) -> None:
    """Raise ConfigError with the first difference unless the tokenizers of two folders have the same
    vocabulary. setting: the setting that names the draft model's folder, for the error."""
    if not (draft / "tokenizer.json").is_file():
        raise ConfigError(f"{setting}: {draft} has no tokenizer.json; wanted that of the draft model")
    ours, theirs = load_tokenizer(draft, setting), load_tokenizer(target, "tokenizer_dir")
    difference = vocabulary_difference(ours, theirs)
    if difference:
        raise ConfigError(
            f"{setting}: the tokenizer of the draft model in {draft} is not that of the served model: "
            f"{difference}"
        )


def vocabulary_difference(draft: Tokenizer, target: Tokenizer) -> str:
    """Return the first difference between a draft model's and the target's tokenizer, as found and wanted;
    "" if they have the same vocabulary."""
    found, wanted = vocabulary_digest(draft), vocabulary_digest(target)
    if found == wanted:
        return ""
    ends = f"digest {found[:12]}, wanted {wanted[:12]}"
    ours, theirs = _ids(draft), _ids(target)
    if len(ours) != len(theirs):
        return f"found {len(ours):,} tokens, wanted {len(theirs):,} ({ends})"
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            return (
                f"found id {token} = {_shown(ours.get(token))}, wanted {_shown(theirs.get(token))} ({ends})"
            )
    return f"its merges or scores differ: found {ends}"


def _facts(tokenizer: Tokenizer) -> dict[str, Any]:
    found = json.loads(tokenizer.to_str())
    model, added = found["model"], found.get("added_tokens") or []
    facts = {name: model.get(name) for name in ("type", "vocab", "merges")}
    return {**facts, "added": sorted((one["id"], one["content"]) for one in added)}


def _ids(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(text: str | None) -> str:
    return "nothing" if text is None else repr(text[:40])
