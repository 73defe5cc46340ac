"""Grammars by llguidance, behind the interface of matcher.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from tridecode.backend.engine.grammars.grammar_text import grammar_of
from tridecode.backend.engine.grammars.matcher import GrammarFault, Vocabulary
from tridecode.backend.wire.structured_output import StructuredOutput

#: of its errors, in characters: they repeat parts of the grammar
_MAX_TEXT = 400
_LISTING = re.compile(r"\s*(\d+ \||\^+\s*$)")
#: llguidance's words, and ours
_MEANINGS = {
    "NoExtensionBias": "it allows no token here",
    "NoExtension": "it allows no token here",
    "ParserTooComplex": "it is too ambiguous (limit of the parser's items)",
    "oneOf constraints are not supported": "oneOf with alternatives that may overlap is not supported",
    "LexerTooComplex": "its regular expressions have too many states",
}


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar.

    Fuel and items bound the time of a mask to about 20 ms, states the memory to about 100 MB (2 kB each).
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class _Words:
    """The form in which LLTokenizer takes a vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[bytes], list[int]]):
        self.eos_token_id = vocabulary.end_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.encode("utf-8") if isinstance(text, str) else text)


class Guidance:
    """A GrammarCompiler. encode: tokenises a text. threads: number of threads that compute masks; 0:
    `advance` must not be called.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[bytes], list[int]], threads: int = 1):
        """Takes about 0.2 s for 50,000 tokens. vocabulary: with at least one end id."""
        self._executor = LLExecutor(threads) if threads else None
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(
            _Words(vocabulary, encode),  # type: ignore[arg-type]  # it looks at the attributes
            n_vocab=len(vocabulary.tokens),
            eos_token=vocabulary.end_ids,
        )

    def compile(self, output: StructuredOutput) -> GuidanceMatcher:
        """GrammarCompiler.compile."""
        try:
            grammar = grammar_of(output, self._vocabulary)
        except GrammarFault as fault:
            raise GrammarFault(f"structured_output ({output.kind}): {fault}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarFault(
                f"structured_output ({output.kind}) is refused: {_meaning(matcher.get_error())}"
            )
        ignored = matcher.get_grammar_warnings()  # of a schema within a grammar
        if ignored:
            raise GrammarFault(f"structured_output ({output.kind}) is refused: {_meaning(ignored[0])}")
        return GuidanceMatcher(matcher)

    def advance(
        self, matchers: list[GuidanceMatcher], tokens: list[int], masks: np.ndarray
    ) -> list[GrammarFault | None]:
        """GrammarCompiler.advance."""
        assert self._executor is not None
        inner = [matcher.inner for matcher in matchers]
        self._executor.consume_token_par(list(zip(inner, tokens)))
        places = [(one, i) for i, one in enumerate(inner)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks[0].nbytes, len(masks))
        return [matcher.fault() if one.is_error() else None for matcher, one in zip(matchers, inner)]


class GuidanceMatcher:
    """A TokenMatcher."""

    def __init__(self, matcher: LLMatcher):
        self.inner = matcher

    def accept(self, tokens: list[int]) -> None:
        """TokenMatcher.accept."""
        if tokens and not self.inner.consume_tokens(tokens):
            raise self.fault()

    def fill(self, mask: np.ndarray) -> None:
        """TokenMatcher.fill."""
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.inner.is_error():
            raise self.fault()

    def is_accepting(self) -> bool:
        """TokenMatcher.is_accepting."""
        return bool(self.inner.is_accepting())

    def forced_tokens(self) -> list[int]:
        """TokenMatcher.forced_tokens."""
        return list(self.inner.compute_ff_tokens())

    def rollback(self, count: int) -> None:
        """TokenMatcher.rollback."""
        if count and (self.inner.is_error() or not self.inner.rollback(count)):
            raise self.fault()

    def copy(self) -> GuidanceMatcher:
        """TokenMatcher.copy."""
        return GuidanceMatcher(self.inner.deep_copy())

    def fault(self) -> GrammarFault:
        """Return the error of a matcher that has one."""
        return GrammarFault(
            f"structured_output: the answer cannot obey it: {_meaning(self.inner.get_error())}", "answer"
        )


def _meaning(text: str) -> str:
    """Return an error of llguidance as one line of at most _MAX_TEXT characters."""
    text = text.replace("<non-verbose/>", "").strip()
    for name, meaning in _MEANINGS.items():
        if name in text:
            return meaning
    # without the listing of the grammar, and the marks below a place
    lines = [line.strip() for line in text.splitlines() if not _LISTING.match(line)]
    text = " ".join(line for line in lines if line)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
