"""Texts to calibrate with: what is read, and the limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.converters.quantize import texts as texts_module
from tridecode.converters.quantize.texts import check_texts, read_texts, token_sequences


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_texts_are_the_field_text_of_each_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"text": "one", "id": 3}, {"text": " "}, {"text": "zwei ü"})
    path.write_text(path.read_text() + "\n")
    assert read_texts(path) == ["one", "zwei ü"]


@pytest.mark.parametrize(
    "value, complaint",
    [
        ({"txt": "one"}, "line 2: .*`text`.*wanted"),
        (["one"], "line 2: .*wanted"),
        ({"text": 3}, "line 2: .*wanted"),
        ({"text": "a" * 300}, "text 2 has 300 characters; wanted at most 200"),
    ],
)
def test_other_files_are_refused(value: object, complaint: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(texts_module, "MAX_TEXT_CHARACTERS", 200)
    with pytest.raises(ConfigError, match=complaint):
        read_texts(lines(tmp_path / "t.jsonl", {"text": "one"}, value))


def test_limits_of_a_file_come_first(tmp_path: Path, monkeypatch) -> None:
    path = lines(tmp_path / "t.jsonl", *[{"text": "one"}] * 4)
    monkeypatch.setattr(texts_module, "MAX_TEXTS", 3)
    with pytest.raises(ConfigError, match="more than 3 lines"):
        read_texts(path)
    with pytest.raises(ConfigError, match="4 texts; wanted 1 to 3"):
        check_texts(["one"] * 4, "here")
    monkeypatch.setattr(texts_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(CheckpointError, match="bytes; wanted at most 10"):
        read_texts(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_texts(tmp_path / "none.jsonl")


def test_a_file_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no text"):
        read_texts(lines(tmp_path / "e.jsonl", {"text": ""}))


class Letters:
    """A tokenizer with an id for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


def test_long_texts_are_cut_and_the_total_is_kept() -> None:
    assert token_sequences(["abcdefg", "zb", "hi", "j"], Letters(), 12, 4, total=9) == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [1],
        [7],
    ]
    with pytest.raises(ConfigError, match="no token of the model"):
        token_sequences(["zzz"], Letters(), 12, 4)
