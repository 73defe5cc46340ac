"""Questions and scores of evaluate-prompts, by examples of SQuAD's rules; tests/integration runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.evaluate.prompt_run import learned_of
from tridecode.tools.evaluate.prompt_tasks import SQUAD, Item, read_items, score


@pytest.mark.parametrize(
    "answer, right, exact, f1",
    [
        ("The Denver Broncos.", ["denver broncos"], True, 1.0),
        ("Denver", ["Denver Broncos"], False, 2 / 3),
        ("in the city of Denver", ["Denver Broncos", "Denver city"], False, 2 * 2 / (4 + 2)),
        ("Paris", ["Denver Broncos"], False, 0.0),
        ("", ["the"], True, 1.0),
        ("", ["Denver"], False, 0.0),
    ],
)
def test_answers_are_scored_as_squad_does(answer: str, right: list[str], exact: bool, f1: float) -> None:
    found = score(answer, right)
    assert (found.exact, found.f1) == (exact, pytest.approx(f1))


def test_questions_are_lines_of_json(tmp_path: Path) -> None:
    data = tmp_path / "squad.jsonl"
    rows = [
        {"taskname": "squad", "context": "C1", "question": "Q1", "answer": "A1"},
        {"context": "C2", "question": "Q2", "answer": ["A2", "A3"]},
    ]
    data.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    first = Item(0, "Context: C1\n\nQuestion: Q1\n\nAnswer:", ("A1",))
    assert read_items(data, SQUAD) == [first, Item(2, "Context: C2\n\nQuestion: Q2\n\nAnswer:", ("A2", "A3"))]
    assert read_items(data, "{question}?", 1) == [Item(0, "Q1?", ("A1",))]


@pytest.mark.parametrize(
    "text, template, told",
    [
        ("", SQUAD, "has no questions"),
        ("{", SQUAD, "line 1 is not valid JSON"),
        ('{"context": "a", "question": "b"}', SQUAD, 'line 1 has no "answer"'),
        ('{"question": "b", "answer": "c"}', SQUAD, 'line 1 has no "context", which the template names'),
        ('{"answer": "c"}', "{", "the template '{' is not valid"),
    ],
)
def test_bad_data_is_told(text: str, template: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_items(tmp_path / "data.jsonl", template)


def test_options_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    for arguments in (
        (0, tmp_path, None, None, None),
        (0, None, None, 50257, None),
        (None, None, None, 5, 3),
    ):
        with pytest.raises(ConfigError, match="wanted one of them|--start-id wants"):
            learned_of(*arguments)
    assert learned_of(1, None, None, 50257, 3).ids() == [50257, 50258, 50259]
