"""Texts, bytes and places of single tokens: their bytes are those of the text that transformers decodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.checkpoints import tiny_tokenizer
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.token_texts import TextOffsets, TokenTexts


def byte_level() -> Tokenizer:
    return tiny_tokenizer().backend_tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: pieces with ▁, and bytes for what the vocabulary lacks."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", *"▁abcdefgh.", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def texts_of(tokenizer: Tokenizer, skips: bool = True) -> TokenTexts:
    return TokenTexts(TokenizerView(tokenizer, skips))


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
TEXTS = st.text(st.sampled_from("ab .港é😀\n\ufffd") | st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_the_bytes_of_tokens_are_those_of_their_text(name, text) -> None:
    tokenizer = TOKENIZERS[name]
    found = texts_of(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert b"".join(map(found.bytes_of, ids)) == whole.encode("utf-8")
    # each token begins in the text where the bytes before it end a character
    offsets, before = TextOffsets(found, start=7), b""
    for token in ids:
        assert offsets.next(token) == 7 + len(before.decode("utf-8", "ignore"))
        before += found.bytes_of(token)


def test_parts_of_a_character_have_labels_of_their_own() -> None:
    for tokenizer in TOKENIZERS.values():
        found = texts_of(tokenizer)
        ids = tokenizer.encode("港", add_special_tokens=False).ids
        assert len(ids) == 3
        assert [found[token] for token in ids] == ["\ufffd"] * 3
        assert "".join(map(found.label, ids)) == "\\xe6\\xb8\\xaf"
        last = tokenizer.encode(" ab", add_special_tokens=False).ids[-1]
        assert found.label(last) == found[last] and "b" in found[last]


def test_special_tokens_of_tool_calls_are_shown_where_the_others_are_skipped() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<tool_call>", "<other>"])
    ids = tokenizer.encode("<tool_call> a<other></s>", add_special_tokens=False).ids
    texts = {
        shown: view.text(view.shown(ids))
        for shown in ((), ("<tool_call>",))
        for view in [TokenizerView(tokenizer, True, shown=shown)]
    }
    assert texts == {(): " a", ("<tool_call>",): "<tool_call> a"}


def test_skipped_special_tokens_take_no_room_in_the_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("</s>")
    ids = [*tokenizer.encode("a", add_special_tokens=False).ids, end, end]
    hidden, shown = TextOffsets(texts_of(tokenizer)), TextOffsets(texts_of(tokenizer, skips=False))
    assert [hidden.next(token) for token in ids] == [0, 1, 1]
    assert [shown.next(token) for token in ids] == [0, 1, 1 + len("</s>")]
    assert texts_of(tokenizer).bytes_of(end) == b"</s>"
