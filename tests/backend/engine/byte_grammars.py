"""Grammars over a vocabulary of single bytes, for tests of the texts that a grammar accepts."""

from __future__ import annotations

import functools

import pytest

from tridecode.backend.engine.grammars.guidance import Guidance, GuidanceMatcher
from tridecode.backend.engine.grammars.matcher import GrammarFault, Vocabulary
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.wire.structured_output import StructuredOutput


@functools.cache
def compiler() -> Guidance:
    """Return a compiler whose tokens are single bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    return Guidance(Vocabulary(tokens, frozenset([256]), [256]), list, threads=0)


def compiled(kind: str, text: str) -> GuidanceMatcher:
    return compiler().compile(prepare(StructuredOutput(kind, text)))


def accepts(matcher: GuidanceMatcher, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = matcher.copy()
    try:
        matcher.accept(list(text.encode()))
    except GrammarFault:
        return False
    return matcher.is_accepting()


def begins(matcher: GuidanceMatcher, text: str) -> bool:
    """Return whether an answer may begin with a text."""
    matcher = matcher.copy()
    try:
        matcher.accept(list(text.encode()))
    except GrammarFault:
        return False
    return True


def fault_of(kind: str, text: str) -> str:
    """Return the text of the fault of a grammar."""
    with pytest.raises(GrammarFault) as found:
        compiled(kind, text)
    return str(found.value)
