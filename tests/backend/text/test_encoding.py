"""Texts to token ids: those of `tokenizers`, lazily, without blocking other threads."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.doors.tokenizers_at_hand import byte_level, metaspace_unigram, sentencepiece_bpe
from tests.waiting import interpreter_gaps
from tridecode.backend.text.encoding import bad_word_ids, encode

TOKENIZERS = {"bytes": byte_level, "sentencepiece": sentencepiece_bpe, "unigram": metaspace_unigram}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=30), max_size=4), special=st.booleans())
def test_the_ids_are_those_of_encode(kind, texts, special):
    tokenizer = TOKENIZERS[kind]()
    wanted = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
    assert list(encode(tokenizer, texts, special)) == wanted


def test_texts_that_the_caller_does_not_reach_are_not_tokenised():
    seen: list[int] = []

    class Tokenizer:
        def encode_batch_fast(self, texts, add_special_tokens):
            seen.append(len(texts))
            return byte_level().encode_batch(texts, add_special_tokens=add_special_tokens)

        encode_batch = encode_batch_fast

    ids = encode(Tokenizer(), ["a" * 100_000] * 6)
    next(ids)
    assert seen == [2]
    assert len(list(ids)) == 5 and seen == [2, 2, 2]


def test_other_threads_run_while_a_large_text_is_tokenised():
    text = "the quick brown fox " * 150_000
    with interpreter_gaps() as gaps:
        began = time.monotonic()
        list(encode(byte_level(), [text]))
        took = time.monotonic() - began
    assert max(gaps) < max(0.3, took / 3), (max(gaps), took)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bad_words_have_the_ids_of_both_spellings(kind):
    tokenizer = TOKENIZERS[kind]()
    rows = [("fox", "lazy dog"), (), ("fox",), ("fox", "lazy dog")]

    def spellings(word: str) -> list[list[int]]:
        found = [tokenizer.encode(text, add_special_tokens=False).ids for text in (word, " " + word)]
        return found[:1] if found[0] == found[1] else found

    assert bad_word_ids(tokenizer, rows) == [[ids for word in row for ids in spellings(word)] for row in rows]
