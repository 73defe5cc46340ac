"""The size of a tokenizer's vocabulary, without transformers."""

from __future__ import annotations

from tokenizers import Tokenizer


def vocabulary_size(tokenizer: Tokenizer, with_added_tokens: bool = True) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab(with_added_tokens=with_added_tokens).values(), default=-1) + 1
