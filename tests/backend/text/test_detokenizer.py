"""The concatenated pieces equal the decoding of the whole list by `tokenizers`, however the ids arrive."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.backend.doors.tokenizers_at_hand import CORPUS, byte_level, metaspace_unigram, sentencepiece_bpe
from tridecode.backend.text.clean_up import StreamCleanUp, clean_up
from tridecode.backend.text.detokenizer import StreamDecoder, TokenizerView
from tridecode.backend.text.tokenizer_files import cleans_up, load_tokenizer

KINDS = {
    "byte_level": byte_level,
    "sentencepiece_bpe": sentencepiece_bpe,
    "metaspace_unigram": metaspace_unigram,
}
kinds = pytest.mark.parametrize("kind", KINDS)
skips = pytest.mark.parametrize("skip", [True, False])

texts = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("東京は日本の首都です世界 \n\t e\u0301\u0308😀👍🏽👨\u200d👩\u200d👧éßñ"),
        st.sampled_from("abc the "),
    ),
    max_size=60,
)


def pieces(view: TokenizerView, ids: list[int], cuts: list[int], context: list[int] = ()) -> list[str]:
    decoder = StreamDecoder(view, context)
    out, start = [], 0
    for cut in [*sorted(cuts), len(ids)]:
        out.append(decoder.push(ids[start:cut]))
        start = max(start, cut)
    return [*out, decoder.flush()]


@kinds
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_a_text_are_the_text_at_once(kind, data):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    got = pieces(TokenizerView(tokenizer, True), ids, cuts)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True)


@kinds
@skips
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_ids_are_the_decoding_at_once(kind, skip, data):
    tokenizer = KINDS[kind]()
    view = TokenizerView(tokenizer, skip)
    size = tokenizer.get_vocab_size()
    plain = [i for i in range(size) if i not in view.byte_ids]
    # runs are short: the contract excepts malformed runs that are longer than those held back
    word = st.lists(st.sampled_from(plain), min_size=1, max_size=4)
    run = st.lists(st.sampled_from(sorted(view.byte_ids) or plain), max_size=12)
    ids = [
        i for pair in data.draw(st.lists(st.tuples(word, run), max_size=20)) for part in pair for i in part
    ]
    cuts = (
        list(range(len(ids))) if data.draw(st.booleans()) else data.draw(st.lists(st.integers(0, len(ids))))
    )
    assert "".join(pieces(view, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(2, 257), min_size=80, max_size=200))
def test_long_runs_of_random_bytes_decode_as_at_once(ids):
    tokenizer = byte_level()
    got = pieces(TokenizerView(tokenizer, True), ids, list(range(len(ids))))
    assert "".join(got) == tokenizer.decode(ids)


@kinds
@pytest.mark.parametrize("character", ["😀", "東", "é", "👨\u200d👩\u200d👧", "\u0e01\u0e34"])
def test_a_long_row_of_multi_byte_characters_streams_without_broken_ones(kind, character):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("go " + character * 120, add_special_tokens=False).ids
    got = pieces(TokenizerView(tokenizer, True), ids, list(range(len(ids))))
    assert "".join(got) == tokenizer.decode(ids)
    if tokenizer.token_to_id("<unk>") not in ids:
        assert not any("\ufffd" in piece for piece in got)
        assert len([piece for piece in got if piece]) > 3  # it did stream


@kinds
@settings(max_examples=150, deadline=None)
@given(prompt=texts, data=st.data())
def test_pieces_continue_the_text_of_the_prompt(kind, prompt, data):
    tokenizer = KINDS[kind]()
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False).ids
    view = TokenizerView(tokenizer, True)
    got = "".join(pieces(view, ids, list(range(len(ids))), prompt_ids))
    assert tokenizer.decode(prompt_ids) + got == tokenizer.decode(prompt_ids + ids)


def test_a_word_after_the_prompt_keeps_its_space():
    tokenizer = metaspace_unigram()
    prompt, ids = tokenizer.encode("Hello").ids, tokenizer.encode("world").ids
    assert "".join(pieces(TokenizerView(tokenizer, True), ids, [], prompt)) == " world"


def test_ids_that_the_tokenizer_does_not_know_are_passed_over():
    tokenizer = byte_level()
    ids = tokenizer.encode("fox").ids
    got = pieces(TokenizerView(tokenizer, True), [50_000, *ids, 2**31 - 1, -1], [])
    assert "".join(got) == "fox"


def test_special_tokens_show_only_where_they_are_wanted():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a dog").ids, tokenizer.token_to_id("<|endoftext|>")]
    assert "".join(pieces(TokenizerView(tokenizer, True), ids, [])) == "a dog"
    assert "".join(pieces(TokenizerView(tokenizer, False), ids, [])) == "a dog<|endoftext|>"


@kinds
def test_the_cost_of_a_push_does_not_grow_with_the_text(kind, monkeypatch):
    tokenizer = KINDS[kind]()
    view = TokenizerView(tokenizer, True)
    decoded = []
    original = TokenizerView.decode
    monkeypatch.setattr(
        TokenizerView, "decode", lambda self, ids: decoded.append(len(ids)) or original(self, ids)
    )
    generator = random.Random(5)
    decoder = StreamDecoder(view)
    for _ in range(2000):
        decoder.push([generator.randrange(tokenizer.get_vocab_size())])
    assert max(decoded, default=0) <= 65
    assert sum(decoded) < 2000 * 90


@skips
@pytest.mark.parametrize("sequence", [False, True])
def test_added_tokens_of_a_byte_level_tokenizer_are_decoded_as_at_once(skip, sequence):
    tokenizer = byte_level()
    tokenizer.add_tokens(["é", "東京", "two words", "Ġx", "caf\u00e9 x"])  # of the bytes' alphabet, and not
    tokenizer.add_special_tokens(["<|é|>"])
    if sequence:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    view, size = TokenizerView(tokenizer, skip), tokenizer.get_vocab_size()
    assert view.token_bytes is not None
    generator = random.Random(7)
    drawn = [[generator.randrange(size - 8, size) for _ in range(9)] for _ in range(40)]
    for ids in [*([i] for i in range(size)), *drawn]:
        for cuts in ([], list(range(len(ids)))):
            wanted = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces(view, ids, cuts)) == wanted


# ---------------------------------------------------------------- clean_up_tokenization_spaces

WORDS = ["well", ",", "it", "'s", "here", "!", "is", "n't", "?", "i", "'m", "sure", "we", "'ve", "'re", "'",
         "m", "n", "t", "ve", "e", ".", "a", "the", "'t"]  # fmt: skip


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<unk>"])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def word_piece() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate([*WORDS, "##s", "##e", "##'", "[UNK]"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


CLEANED = {**KINDS, "word_level": word_level, "word_piece": word_piece}


@pytest.mark.parametrize("kind", CLEANED)
@pytest.mark.parametrize("setting", [None, False, True, "bpe"])
def test_a_folder_is_decoded_as_transformers_decodes_it(tmp_path, kind, setting):
    theirs = PreTrainedTokenizerFast(tokenizer_object=CLEANED[kind]())
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings_ = json.loads(path.read_text())
    settings_.pop("clean_up_tokenization_spaces", None)
    if setting is not None:
        settings_["clean_up_tokenization_spaces"] = bool(setting)
    if setting == "bpe":
        settings_["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    path.write_text(json.dumps(settings_))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "a test")
    view = TokenizerView(tokenizer, True, cleans_up(tmp_path, tokenizer))
    text = "well , it 's here ! is n't it ? i 'm sure we 've ' m ' we 're the e ve . "
    ids = tokenizer.encode(text, add_special_tokens=False).ids * 3
    wanted = theirs.decode(ids, skip_special_tokens=True)
    assert view.text(view.shown(ids)) == wanted
    for size in (1, 2, 7, len(ids)):
        assert "".join(pieces(view, ids, list(range(0, len(ids), size)))) == wanted
    changes = setting == "bpe" or (setting is True and kind not in ("byte_level", "sentencepiece_bpe"))
    assert (
        wanted != theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ) == changes


@settings(max_examples=500, deadline=None)
@given(
    st.text(st.sampled_from(" .?!,'ntmsvrexa"), max_size=60) | st.text(st.sampled_from(" 'nt"), max_size=40),
    st.lists(st.integers(0, 60), max_size=20),
)
def test_cleaned_pieces_are_the_cleaned_text(text, cuts):
    wanted = PreTrainedTokenizerFast(tokenizer_object=byte_level()).clean_up_tokenization(text)
    assert clean_up(text) == wanted
    stream, start, out = StreamCleanUp(), 0, ""
    for cut in sorted(cuts):
        out += stream.push(text[start:cut])
        start = max(start, cut)
    assert out + stream.push(text[start:]) + stream.flush() == wanted


def test_little_is_held_back_of_a_usual_text():
    stream, pushed, out = StreamCleanUp(), "", ""
    for word in CORPUS[0].split() * 20:
        pushed += f" {word}"
        out += stream.push(f" {word}")
        assert len(pushed) - len(out) <= 8
