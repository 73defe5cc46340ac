"""Converts texts to token ids without blocking the other threads of the process.

Measured with tokenizers 0.23 on 4 MB of text: `encode` holds the GIL for all of its 5.6 s; `encode_batch`
releases it but also computes the character offset of each token (4 to 9 s); `encode_batch_fast` releases it
and skips the offsets (1.7 s, and no other thread waits longer than 0.05 s).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from tokenizers import Tokenizer

#: characters per call, about 100 ms; a caller can give up between two calls
_GROUP = 262_144


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False
) -> Iterator[list[int]]:
    """Yield the ids of each text, in order. Lazy: texts that the caller does not reach are not tokenised."""
    batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # since tokenizers 0.20
    call = partial(batch, add_special_tokens=add_special_tokens)
    for group in _groups(texts):
        yield from (encoding.ids for encoding in call(group))


def bad_word_ids(tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
    """Return for each row the token ids of its bad words, each word as at the start of a text and as after a
    space.

    Equal spellings and words without ids are left out.
    """
    spellings = {words: [text for word in words for text in (word, f" {word}")] for words in rows}
    texts = list(dict.fromkeys(text for row in spellings.values() for text in row))
    ids = dict(zip(texts, map(tuple, encode(tokenizer, texts))))
    known = {
        words: [list(tokens) for tokens in dict.fromkeys(ids[text] for text in row) if tokens]
        for words, row in spellings.items()  # rows often have the same words
    }
    return [known[words] for words in rows]


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _GROUP:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
