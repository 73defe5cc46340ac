"""Two tokenizers have one vocabulary if every id stands for the same text in both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.text.vocabulary_match import check_same_vocabulary, vocabulary_difference


def changed(change) -> Tokenizer:
    """The tiny tokenizer with a change of its JSON."""
    facts = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    change(facts)
    return Tokenizer.from_str(json.dumps(facts))


def swap(facts: dict) -> None:
    vocab = facts["model"]["vocab"]
    first, second = [text for text, token in vocab.items() if token in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def rename(facts: dict) -> None:
    facts["added_tokens"][0]["content"] = "<|other|>"
    facts["model"]["vocab"]["<|other|>"] = facts["model"]["vocab"].pop("<|endoftext|>")


def drop_a_merge(facts: dict) -> None:
    facts["model"]["merges"].pop()


def add(facts: dict) -> None:
    kind = facts["added_tokens"][0]
    facts["added_tokens"].append({**kind, "id": len(facts["model"]["vocab"]), "content": "<more>"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swap, r"found id 300 = '.*', wanted '.*' \(digest [0-9a-f]{12}, wanted [0-9a-f]{12}\)"),
        (rename, r"found id 0 = '<\|other\|>', wanted '<\|endoftext\|>'"),
        (drop_a_merge, "its merges or scores differ"),
        (add, "found [0-9]+ tokens, wanted [0-9]+"),
    ],
)
def test_the_first_difference_is_named(change, text: str) -> None:
    found = vocabulary_difference(changed(change), tiny_tokenizer().backend_tokenizer)
    assert re.search(text, found), found


def test_templates_and_classes_of_tokens_do_not_count() -> None:
    def other_class(facts: dict) -> None:
        facts["added_tokens"][1]["special"] = False

    served = tiny_tokenizer().backend_tokenizer
    assert vocabulary_difference(tiny_tokenizer(adds_bos=True).backend_tokenizer, served) == ""
    assert vocabulary_difference(changed(other_class), served) == ""


def test_folders_are_compared_by_name(tmp_path: Path) -> None:
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    tiny_tokenizer().backend_tokenizer.save(str(tmp_path / "target" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="draft_path: .*draft has no tokenizer.json"):
        check_same_vocabulary(tmp_path / "draft", tmp_path / "target", "draft_path")
    changed(swap).save(str(tmp_path / "draft" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="is not that of the served model: found id 300"):
        check_same_vocabulary(tmp_path / "draft", tmp_path / "target", "draft_path")
    (tmp_path / "draft" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a valid tokenizer"):
        check_same_vocabulary(tmp_path / "draft", tmp_path / "target", "draft_path")
