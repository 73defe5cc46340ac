"""Finds the contracts that a repository serves, and the option of build-repo that adds a missing model."""

from __future__ import annotations

import re
from pathlib import Path

from tridecode.model_repo_templates.served import SERVED, Choices

_DOOR = re.compile(rb"tridecode\.backend\.doors\.(\w+) import")
_MAX_BYTES = 4096  # bytes of a model.py; ours have one line
_UNKNOWN = re.compile(r"unknown model: '([^']+)'")


def contracts_in(repository: Path) -> list[str]:
    """Return the contracts whose doors all have a model in `repository`, whatever the models' names.

    A repository without a tokenizer has only the contracts of token ids.
    """
    files = [file for file in repository.glob("*/1/model.py") if file.is_file()]
    texts = [file.read_bytes() for file in files if file.stat().st_size <= _MAX_BYTES]
    doors = {found[1].decode() for text in texts if (found := _DOOR.search(text))}
    has_text = any((_needed(name, True) - _needed(name, False)) & doors for name in SERVED)
    return [name for name in SERVED if (needed := _needed(name, has_text)) and needed <= doors]


def _needed(contract: str, text: bool) -> set[str]:
    """Return the kinds of its models that have a door."""
    models = SERVED[contract].models(Choices())
    return {m.template for m in models if (text or not m.needs_text) and not m.template.endswith("ensemble")}


def in_words(repository: Path) -> str:
    """Describe the contracts that a repository serves, and those that it could serve besides."""
    served = contracts_in(repository)
    others = [name for name in SERVED if name not in served]
    more = f" (not built: {', '.join(others)}; see tridecode build-repo --contract)" if others else ""
    return f"{', '.join(served) or 'none'}{more}"


def options_for(model: str) -> list[str]:
    """Return the options of build-repo that add a model of this name, one per contract that can have it."""
    found = []
    for contract, served in SERVED.items():
        variants = {
            "": Choices(),
            f" --decoupled {contract}": Choices(decoupled=frozenset([contract])),
            " --plain-text": Choices(plain_text=True),
            " --unbatched-text": Choices(unbatched_text=True),
        }
        for option, choices in variants.items():
            if any(one.name == model for one in served.models(choices)):
                found.append(f"--contract {contract}{option}")
                break
    return found


def with_advice(message: str) -> str:
    """Return a server's error; if it reports an unknown model, add the options that build one of that
    name.
    """
    found = _UNKNOWN.search(message)
    options = options_for(found[1]) if found else []
    return f"{message}; tridecode build-repo {' or '.join(options)} makes it" if options else message
