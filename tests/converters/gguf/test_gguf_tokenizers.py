"""Tokenizers of GGUF files split texts as llama.cpp itself does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from tests.checkpoints import TEXTS
from tests.converters.gguf.gguf_files import (
    CONTROL,
    HARD_TEXTS,
    NORMAL,
    bpe_keys,
    byte_level_bpe,
    sentencepiece_keys,
    write_vocabulary,
)
from tests.llama_cpp import LlamaCpp
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from tridecode.converters.parity.files import compare_tokenizers
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer, save_tokenizer

ALL_TEXTS = [*HARD_TEXTS, *PROBES, *TEXTS]


def ours(path: Path) -> Tokenizer:
    return save_tokenizer(load_tokenizer(open_checkpoint(path)), None, path.parent / f"{path.stem}-tokenizer")


def assert_splits_as_llama_cpp(path: Path, texts: list[str] = ALL_TEXTS) -> None:
    found, wanted = ours(path), LlamaCpp(path)
    for text in texts:
        for special in (True, False):
            ids = wanted.tokenize(text, special)
            assert found.encode(text, add_special_tokens=special).ids == ids, (text, special)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - {"gpt2"}))
def test_every_pre_tokenizer_splits_as_in_llama_cpp(pre, tmp_path: Path) -> None:
    assert_splits_as_llama_cpp(write_vocabulary(tmp_path / "m.gguf", bpe_keys(pre)))


def test_a_file_without_a_pre_tokenizer_is_split_as_in_llama_cpp_and_says_so(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", bpe_keys())
    assert_splits_as_llama_cpp(path)
    assert "has no tokenizer.ggml.pre" in open_checkpoint(path).notes[0]


BPE_CASES = {
    "no BOS": bpe_keys("llama-bpe", add_bos_token=False),
    "BOS": bpe_keys("qwen2", add_bos_token=True),
    "EOS": bpe_keys("gpt-2", add_eos_token=True),
    "a prefix that BPE ignores": bpe_keys("gpt-2", add_space_prefix=True),
    "settings of other kinds": bpe_keys("gpt-2", add_sep_token=True, remove_extra_whitespaces=True),
}
#: whole words of the vocabulary to which no merges lead: only ignore_merges gives them
WHOLE = ["Ġdefinitely", "definitely", "ĠĠtwo"]


@pytest.mark.parametrize("case", BPE_CASES)
def test_keys_of_a_byte_level_vocabulary(case, tmp_path: Path) -> None:
    assert_splits_as_llama_cpp(write_vocabulary(tmp_path / "m.gguf", BPE_CASES[case]))


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "minicpm5", "gpt-2", "qwen2"])
def test_words_without_merges_are_taken_whole_where_the_name_says_so(pre, tmp_path: Path) -> None:
    keys = bpe_keys(pre)
    keys["tokens"] = [*keys["tokens"], *WHOLE]
    keys["token_type"] = [*keys["token_type"], *[NORMAL] * len(WHOLE)]
    path = write_vocabulary(tmp_path / "m.gguf", keys)
    assert_splits_as_llama_cpp(path, ["definitely", "so definitely", "  two definitely"])
    taken = keys["tokens"].index("definitely") in ours(path).encode("definitely").ids
    assert taken == (pre not in ("gpt-2", "qwen2"))


SENTENCEPIECE_CASES = {
    "as LLaMA": sentencepiece_keys(),
    "no prefix, as Gemma": sentencepiece_keys(add_space_prefix=False),
    "neither BOS nor prefix": sentencepiece_keys(add_space_prefix=False, add_bos_token=False),
    "BOS and EOS": sentencepiece_keys(add_bos_token=True, add_eos_token=True),
    "other ids": sentencepiece_keys(bos_token_id=2, eos_token_id=1, unknown_token_id=0),
    "blanks kept whatever the key says": sentencepiece_keys(remove_extra_whitespaces=True),
    "Phi-3, whose special tokens eat blanks": {
        **sentencepiece_keys(tokens=[token.replace("  ", "<x>") for token in sentencepiece_keys()["tokens"]]),
        "general.name": "Phi-3 mini",
    },
}


@pytest.mark.parametrize("case", SENTENCEPIECE_CASES)
def test_keys_of_a_sentencepiece_vocabulary(case, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", SENTENCEPIECE_CASES[case])
    assert_splits_as_llama_cpp(path, [*ALL_TEXTS, "<|user|>  \n hi<s> x</s>  y<|end|> z"])


def test_a_sentencepiece_vocabulary_gives_the_text_back(tmp_path: Path) -> None:
    for prefix in (True, False):
        path = write_vocabulary(tmp_path / f"{prefix}.gguf", sentencepiece_keys(add_space_prefix=prefix))
        tokenizer = ours(path)
        for text in ("hello world", " blank 🚀 ÄÖ ", "日本語"):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_ids_that_end_a_text(tmp_path: Path) -> None:
    keys = bpe_keys("llama-bpe")
    size = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], "<|eot_id|>", "<|eom_id|>"]
    keys["token_type"] = [*keys["token_type"], CONTROL, CONTROL]
    path = write_vocabulary(tmp_path / "m.gguf", keys)
    assert open_checkpoint(path).eos_ids == [keys["eos_token_id"], size, size + 1]
    keys["eot_token_id"] = 7
    path = write_vocabulary(tmp_path / "n.gguf", keys)
    assert open_checkpoint(path).eos_ids == [keys["eos_token_id"], 7, size, size + 1]


def test_a_comparison_asks_llama_cpp_and_finds_a_wrong_split(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", bpe_keys("llama-bpe"))
    checkpoint = open_checkpoint(path)
    source = load_tokenizer(checkpoint)
    right = save_tokenizer(source, None, tmp_path / "t")
    found = compare_tokenizers(tmp_path / "t", right, source, checkpoint)
    assert (found.reference, found.passed) == ("llama.cpp", True)
    source.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    wrong = Tokenizer.from_str(source.backend_tokenizer.to_str())
    found = compare_tokenizers(tmp_path / "t", wrong, source, checkpoint)
    assert (found.agreement, found.passed) == (0.0, False)


REFUSED = {
    "split_digits": (bpe_keys("gpt-2", split_digits=True), "tokenizer.ggml.split_digits, which this version"),
    "another kind": (sentencepiece_keys(model="t5"), "tokenizer.ggml.model = 't5'; this version reads gpt2"),
    "an unknown split": (bpe_keys("new-model"), "tokenizer.ggml.pre = new-model, which cannot be rebuilt"),
    "a split in code": (bpe_keys("kimi-k2"), "tokenizer.ggml.pre = kimi-k2, which cannot be rebuilt"),
}
DAMAGED = {
    "no tokens": (bpe_keys("gpt-2", tokens=[1, 2]), "tokenizer.ggml.tokens = [1, 2]; wanted an array"),
    "few types": (bpe_keys("gpt-2", token_type=[1]), "1 entries in tokenizer.ggml.token_type; wanted "),
    "few scores": (sentencepiece_keys(scores=[1.0]), "1 entries in tokenizer.ggml.scores; wanted"),
    "a switch": (bpe_keys("gpt-2", add_bos_token=3), "add_bos_token = 3; wanted true or false"),
    "no BOS": (bpe_keys("llama-bpe", bos_token_id=1 << 30), "bos_token_id is missing or out of range"),
    "merges": (bpe_keys("gpt-2", merges=["no such", "q z"]), "the merges do not fit the vocabulary"),
    "twice": (bpe_keys("gpt-2", tokens=[*byte_level_bpe()[0], "a", "b", "c", "d"]), "the token 'a' twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, *DAMAGED])
def test_what_cannot_be_rebuilt_is_refused_by_name(case, tmp_path: Path) -> None:
    keys, complaint = {**REFUSED, **DAMAGED}[case]
    path = write_vocabulary(tmp_path / "m.gguf", keys)
    with pytest.raises(UnsupportedError if case in REFUSED else CheckpointError) as caught:
        load_tokenizer(open_checkpoint(path))
    assert complaint in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_id_that_is_not_known_is_only_named(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", bpe_keys("gpt-2", think_token_id=3))
    assert open_checkpoint(path).notes == ["keys of the tokenizer that are not read: think_token_id"]
    assert_splits_as_llama_cpp(path, ["hello world"])
