"""A tokenizer made from tokenizer.model alone splits text like the sentencepiece package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.checkpoints import TEXTS, save, tiny_gpt2
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer, save_tokenizer
from tridecode.converters.tokenizers.sentencepiece import load_sentencepiece


def trained(directory: Path, **settings) -> sentencepiece.SentencePieceProcessor:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "texts").write_text("\n".join([*TEXTS, *PROBES]))
    sentencepiece.SentencePieceTrainer.train(**{
        "input": str(directory / "texts"), "model_prefix": str(directory / "tokenizer"), "vocab_size": 400,
        "minloglevel": 2, "character_coverage": 0.98, "hard_vocab_limit": False, "byte_fallback": True,
        **settings,
    })  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


KINDS = {
    "bpe": {"model_type": "bpe"},
    "llama": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "no prefix": {"model_type": "bpe", "add_dummy_prefix": False, "normalization_rule_name": "identity"},
    "no bytes": {"model_type": "bpe", "byte_fallback": False},
    "unigram": {"model_type": "unigram"},
    "own tokens": {"model_type": "bpe", "user_defined_symbols": ["<pad>", "<|x|>"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_split_and_joined_as_by_sentencepiece(tmp_path, kind):
    original = trained(tmp_path, **KINDS[kind])
    tokenizer = load_sentencepiece(tmp_path, PROBES)
    for text in ["The harbour counts 40 boats.", "größer 🙂 ville", "a b c", "x" * 50, "weiß\tich", *TEXTS]:
        assert tokenizer(text).input_ids == original.encode(text)
        plain = tokenizer.decode(tokenizer(text).input_ids)
        assert plain == original.decode(original.encode(text)) or kind == "no bytes"
    assert tokenizer.bos_token_id == original.bos_id() and tokenizer.eos_token_id == original.eos_id()


def test_a_checkpoint_with_it_alone_gets_the_files_of_a_door(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    original = trained(source, model_type="bpe")
    (source / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}",
            "add_bos_token": True,
            "auto_map": {"AutoTokenizer": ["x.X", None]},
            "added_tokens_decoder": {str(original.vocab_size()): {"content": "<|im|>", "special": True}},
        })
    )  # fmt: skip
    save_tokenizer(load_tokenizer(open_checkpoint(source)), source, tmp_path / "door")
    door = Tokenizer.from_file(str(tmp_path / "door/tokenizer.json"))
    assert door.encode("The city").ids == [original.bos_id(), *original.encode("The city")]
    assert door.encode("<|im|>").ids[1:] == [original.vocab_size()]
    again = AutoTokenizer.from_pretrained(tmp_path / "door")  # as public clients load it
    assert again("The city").input_ids == door.encode("The city").ids
    assert again.chat_template == "{{ messages[0].content }}"


def test_what_is_no_such_model_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00 no model")
    with pytest.raises(CheckpointError, match="tokenizer.model is not a sentencepiece model"):
        load_sentencepiece(tmp_path, PROBES)
    trained(tmp_path, model_type="char")
    with pytest.raises(UnsupportedError, match="neither a BPE nor a unigram model"):
        load_sentencepiece(tmp_path, PROBES)
