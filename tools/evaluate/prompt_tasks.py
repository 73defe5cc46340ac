"""Questions of a task of prompt learning and the scores of their answers, as SQuAD defines them.

A question is a line of JSON, as NeMo's data sets of prompt learning have it: {"context": ..., "question":
..., "answer": a text or a list of texts}. Scores: Rajpurkar et al. 2016, SQuAD's evaluate-v1.1.py.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base.errors import ConfigError

#: NeMo's template of SQuAD, without the virtual tokens before it
SQUAD = "Context: {context}\n\nQuestion: {question}\n\nAnswer:"
_MAX_BYTES = 1 << 30
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Item:
    """One question. number: of its line, from 0. answers: any of them is right."""

    number: int
    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """exact: whether an answer is right after normalisation; f1: of its words, in [0, 1]."""

    exact: bool
    f1: float


def read_items(path: Path, template: str = SQUAD, limit: int | None = None) -> list[Item]:
    """The questions of a JSON-lines file. ConfigError naming file, line and what was wanted."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} holds {path.stat().st_size:,} bytes; wanted at most {_MAX_BYTES:,}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines) if line.strip()]
    items = [_item(path, number, line, template) for number, line in numbered[:limit]]
    if not items:
        raise ConfigError(f"{path} has no questions; wanted one per line, as JSON")
    return items


def _item(path: Path, number: int, line: str, template: str) -> Item:
    where = f"{path}, line {number + 1}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not valid JSON") from None
    answer = values.get("answer") if isinstance(values, dict) else None
    answers: list = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(one, str) for one in answers):
        raise ConfigError(f'{where} has no "answer"; wanted a text, or a list of texts')
    return Item(number, _filled(template, values, where), tuple(answers))


def _filled(template: str, values: Mapping[str, object], where: str) -> str:
    try:
        return template.format_map({key: str(value) for key, value in values.items()})
    except KeyError as error:
        raise ConfigError(f'{where} has no "{error.args[0]}", which the template names') from None
    except (ValueError, IndexError, AttributeError):
        raise ConfigError(
            f"the template {template[:80]!r} is not valid; wanted fields as {{question}}"
        ) from None


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, words separated by single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score(answer: str, right: Sequence[str]) -> Score:
    """The best score of an answer against any of the right ones."""
    return Score(
        any(normalised(answer) == normalised(one) for one in right), max(_f1(answer, one) for one in right)
    )


def _f1(answer: str, right: str) -> float:
    found, wanted = normalised(answer).split(), normalised(right).split()
    common = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * common / (len(found) + len(wanted))
