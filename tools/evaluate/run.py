"""Runs LAMBADA through a server and in transformers, and compares the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.tools.client.chat import find_tokenizer_dir
from tridecode.tools.client.generate import grpc_address
from tridecode.tools.evaluate.lambada import DEFINITIONS, Question, questions, read_items
from tridecode.tools.evaluate.served import ServedModel, ask, find_model
from tridecode.tools.progress import counter


@dataclass(frozen=True)
class Score:
    """Right answers of one definition. reference: in transformers; None: not asked. differing: items that
    only one of the two answers right. right: items that the server answers right.
    """

    definition: str
    items: int
    served: int
    reference: int | None
    differing: list[int]
    right: list[int]

    @property
    def difference(self) -> float | None:
        """Difference in points of accuracy, the server's minus transformers'."""
        return None if self.reference is None else 100 * (self.served - self.reference) / self.items


@dataclass(frozen=True)
class Evaluation:
    """The result of one run."""

    data: str
    model: ServedModel
    reference: str | None
    reference_dtype: str | None
    scores: list[Score]

    def table(self) -> Table:
        found = Table(title=f"LAMBADA, {self.scores[0].items:,} items, model {self.model.name}")
        found.add_column("definition")
        for title in ("server", *(("transformers", "difference") if self.reference else ())):
            found.add_column(title, justify="right")
        for score in self.scores:
            cells = [DEFINITIONS[score.definition], _share(score.served, score.items)]
            if score.reference is not None and score.difference is not None:
                apart = f"{score.difference:+.2f} points ({len(score.differing)} items)"
                cells += [_share(score.reference, score.items), apart]
            found.add_row(*cells)
        return found

    def apart(self, tolerance: float) -> list[str]:
        """A sentence for each definition whose accuracies differ by more than `tolerance` points."""
        return [
            f"{score.definition}: the server's accuracy differs from transformers' by "
            f"{score.difference:+.2f} points; wanted at most {tolerance:g}"
            for score in self.scores
            if score.difference is not None and abs(score.difference) > tolerance + 1e-9
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "model": self.model.name,
            "reference": self.reference,
            "reference_dtype": self.reference_dtype,
            "scores": [
                {
                    "definition": score.definition,
                    "items": score.items,
                    "served_right": score.served,
                    "served_accuracy": 100 * score.served / score.items,
                    "reference_right": score.reference,
                    "reference_accuracy": None
                    if score.reference is None
                    else 100 * score.reference / score.items,
                    "difference": score.difference,
                    "differing_items": score.differing,
                    "served_right_items": score.right,
                }
                for score in self.scores
            ],
        }


def _share(right: int, items: int) -> str:
    return f"{100 * right / items:.2f} % ({right:,}/{items:,})"


def evaluate(
    data: Path,
    url: str,
    model: str | None,
    definitions: Sequence[str],
    *,
    reference: str | None = None,
    reference_dtype: str = "fp16",
    tokenizer: Path | None = None,
    limit: int | None = None,
    concurrency: int = 16,
    timeout_s: float | None = None,
    repository: Path | None = None,
) -> Evaluation:
    """Ask the server and, with `reference`, transformers. All arguments are checked first.

    repository: its engine runs in this process instead of the server; url, model, concurrency and timeout_s
    are ignored.

    Raises ConfigError for the data, the tokenizer or a dtype, EngineDownError and RequestError for the
    server, CheckpointError for the reference, TridecodeError for a request that fails.
    """
    if reference_dtype not in TORCH_DTYPES:
        raise ConfigError(f"reference_dtype is {reference_dtype!r}; wanted one of {', '.join(TORCH_DTYPES)}")
    texts = read_items(data, limit)
    url = grpc_address(url)
    if repository is None:
        served = find_model(url, model)
    else:
        from tridecode.tools.evaluate import in_process  # imports torch

        weights, settings = in_process.repository_engine(repository)
        served = ServedModel(
            f"{in_process.ENGINE} of {repository.name}, without a server", "tokens", decoupled=False
        )
    folder = find_tokenizer_dir(tokenizer or repository, url)
    split = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split.no_truncation()
    asked = questions(split, texts, list(definitions), served.add_special_tokens)
    with counter(f"{served.name} answers", len(asked)) as progress:
        if repository is None:
            ours = ask(url, served, asked, concurrency, progress, timeout_s)
        else:
            ours = in_process.engine_answers(weights, settings, asked, progress)
    theirs: list[bool] | None = None
    if reference is not None:
        from tridecode.tools.evaluate.reference import reference_answers  # imports transformers

        with counter("transformers answers", len(asked)) as progress:
            theirs = reference_answers(reference, reference_dtype, asked, progress)
    scores = [_score(definition, asked, ours, theirs) for definition in definitions]
    return Evaluation(data.name, served, reference, reference_dtype if reference else None, scores)


def _score(
    definition: str, asked: Sequence[Question], ours: Sequence[bool], theirs: Sequence[bool] | None
) -> Score:
    mine = [index for index, question in enumerate(asked) if question.definition == definition]
    right = [asked[index].item for index in mine if ours[index]]
    if theirs is None:
        return Score(definition, len(mine), len(right), None, [], right)
    differing = [asked[index].item for index in mine if ours[index] != theirs[index]]
    return Score(definition, len(mine), len(right), sum(theirs[index] for index in mine), differing, right)
