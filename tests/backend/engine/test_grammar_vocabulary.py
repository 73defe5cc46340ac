"""The bytes of tokens, which masks are computed from, are those of the texts that the tokenizers decode."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.backend.doors.tokenizers_at_hand import CORPUS, byte_level, metaspace_unigram, sentencepiece_bpe
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.engine.grammars import vocabulary
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.loading import load_grammars
from tridecode.backend.engine.grammars.matcher import GrammarFault, Vocabulary
from tridecode.backend.wire.structured_output import StructuredOutput

KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_bpe,
    "unigram": metaspace_unigram,
    "tiny": lambda: Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()),
}
END = 2


def read(folder: Path, kind: str) -> tuple[Tokenizer, Vocabulary]:
    return made(folder, kind)[:2]


def made(folder: Path, kind: str, padding: int = 37) -> tuple[Tokenizer, Vocabulary, Guidance]:
    tokenizer = KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + padding
    found, encode = vocabulary.read_vocabulary(folder, size, [END, -1, size])
    return tokenizer, found, Guidance(found, encode)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_text_are_those_of_its_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer, found = read(tmp_path, kind)
    for text in (*CORPUS, '{"a": [1, "b"]}', "a\n\tb  c"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if any(tokenizer.id_to_token(token) == "<unk>" for token in ids):
            continue
        written = b"".join(found.tokens[token] for token in ids).decode("utf-8")
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert written.removeprefix(" ") == decoded.removeprefix(" ")


@pytest.mark.parametrize("kind", ["sentencepiece", "unigram"])
def test_the_quick_way_agrees_with_decoding(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = read(tmp_path, kind)[1]
    monkeypatch.setattr(vocabulary, "_is_plain", lambda decoder: False)
    slow = read(tmp_path, kind)[1]
    differ = [i for i, pair in enumerate(zip(quick.tokens, slow.tokens)) if pair[0] != pair[1]]
    assert differ == [] and quick.special == slow.special


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_padding_belong_to_no_text(tmp_path: Path, kind: str) -> None:
    tokenizer, found, compiler = made(tmp_path, kind)
    matcher = compiler.compile(StructuredOutput("regex", r"(.|\n){3,}"))
    mask = np.zeros(-(-len(found.tokens) // 32), np.int32)
    matcher.fill(mask)
    possible = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert found.end_ids == [END] and len(possible) > 50
    assert not set(possible) & found.special and possible.max() < tokenizer.get_vocab_size()
    assert all(found.tokens[token] for token in possible)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_can_write_what_a_grammar_wants(tmp_path: Path, kind: str) -> None:
    """The largest of random numbers decides among the possible tokens; a text is decoded in the end."""
    tokenizer, found, compiler = made(tmp_path, kind)
    random, mask = np.random.default_rng(4), np.zeros(-(-len(found.tokens) // 32), np.int32)
    for pattern in (r"(the|dog) [a-d]{2}", r"a{2,5} b", r"(  the| é)? quick"):
        matcher, ids = compiler.compile(StructuredOutput("regex", pattern)), []
        while END not in ids:
            matcher.fill(mask)
            possible = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            ids.append(int(random.choice(possible)))
            matcher.accept([token for token in ids[-1:] if token != END])
        text = tokenizer.decode([*tokenizer.encode("x").ids, *ids[:-1]], skip_special_tokens=True)
        assert re.fullmatch("x" + pattern, text), text


def test_tokens_that_must_follow_are_known(tmp_path: Path) -> None:
    _, found, compiler = made(tmp_path, "byte-level")
    matcher = compiler.compile(StructuredOutput("choice", '["the quick brown fox"]'))
    forced = b"".join(found.tokens[token] for token in matcher.forced_tokens())
    assert forced and b"the quick brown fox".startswith(forced)
    other = matcher.copy()
    other.accept(other.forced_tokens())
    assert len(matcher.forced_tokens()) > len(other.forced_tokens())
    with pytest.raises(GrammarFault):
        matcher.accept([found.tokens.index(b"z")])


def test_the_name_of_a_special_token_is_written_as_text(tmp_path: Path) -> None:
    tokenizer, found, compiler = made(tmp_path, "byte-level")
    matcher = compiler.compile(StructuredOutput("choice", '["a<|endoftext|>b"]'))
    forced = matcher.forced_tokens()
    assert b"".join(found.tokens[token] for token in forced) == b"a<|endoftext|>b"
    assert not set(forced) & found.special


def test_end_tokens_are_the_models_and_not_guessed(tmp_path: Path) -> None:
    """The tokenizer's own settings name another token."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    _, found = read(tmp_path, "byte-level")
    assert found.end_ids == [END]


def test_an_engine_names_why_it_has_no_grammars(tmp_path: Path) -> None:
    assert "names a tokenizer" in load_grammars(None, 100, [2]).fault
    assert "names a tokenizer" in load_grammars(tmp_path, 100, [2]).fault
    (tmp_path / "tokenizer.json").write_text("{")
    assert "is not a valid tokenizer" in load_grammars(tmp_path, 100, [2]).fault
    read(tmp_path, "byte-level")
    assert "no token that ends a text" in load_grammars(tmp_path, 100, [-1]).fault
    assert load_grammars(tmp_path, 100, [2]).fault == ""
