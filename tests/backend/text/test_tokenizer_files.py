"""Tokenizer folders as transformers writes them."""

from __future__ import annotations

import json

import pytest

from tests.backend.doors.tokenizers_at_hand import byte_level
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.text.tokenizer_files import end_token_id, load_tokenizer


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    saved = type(byte_level()).from_str(byte_level().to_str())
    saved.enable_truncation(3)
    saved.enable_padding(length=50)
    saved.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert load_tokenizer(tmp_path, "test").encode(text).ids == byte_level().encode(text).ids


def test_a_folder_without_tokenizer_is_refused_with_the_setting_that_names_it(tmp_path):
    with pytest.raises(
        ConfigError, match=r"tokenizer.json is not a valid tokenizer: .* \(option --tokenizer\)"
    ):
        load_tokenizer(tmp_path, "option --tokenizer")


@pytest.mark.parametrize(
    ("name", "content", "end"),
    [
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, "<|endoftext|>"),
        ("tokenizer_config.json", {"eos_token": {"content": "<pad>"}}, "<pad>"),
        ("special_tokens_map.json", {"eos_token": "<pad>"}, "<pad>"),
        ("tokenizer_config.json", {"eos_token": None}, None),
        ("tokenizer_config.json", {"eos_token": "not in the vocabulary"}, None),
    ],
)
def test_the_end_token_is_that_of_the_files(tmp_path, name, content, end):
    (tmp_path / name).write_text(json.dumps(content))
    wanted = -1 if end is None else byte_level().token_to_id(end)
    assert end_token_id(tmp_path, byte_level()) == wanted
