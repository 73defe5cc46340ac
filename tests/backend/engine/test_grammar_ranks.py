"""Answers that obey a grammar, over tensor ranks that share the vocabulary and over pipeline stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backend.engine.grammar_models import END, random_model, sampled, tokenizer_folder
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import TINY_VOCAB, save, tiny_tokenizer
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

PATTERN = "[a-f]{4}-[0-9]{2,6}"
PARAMETERS = [
    {},
    {"top_k": 5, "return_log_probs": True},
    {"top_p": 0.7, "min_p": 0.01},
    {"top_k": 1, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that neither two ranks nor words of 32 bits divide."""
    folder = tmp_path_factory.mktemp("ranks")
    model = random_model(TINY_VOCAB + 51, layers=2)
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


def answers(offline: OfflineEngine) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log probabilities of requests with a grammar and of one without."""
    output, prompt = StructuredOutput("regex", PATTERN), [5, 6, 7]
    numbers = [
        offline.submit(prompt, sampled(seed=i, max_tokens=20, **params), structured_output=output)
        for i, params in enumerate(PARAMETERS)
    ]
    numbers.append(offline.submit(prompt, sampled(seed=9, max_tokens=20)))
    offline.run()
    found = [offline.generations[number] for number in numbers]
    return [(one.tokens, [round(value, 3) for value in one.log_probs]) for one in found]


@pytest.mark.parametrize(("tensor", "stages", "pipelined"), [(2, 1, False), (1, 2, True), (2, 2, True)])
def test_answers_are_those_of_one_rank(directory: Path, tensor: int, stages: int, pipelined: bool) -> None:
    folder = tokenizer_folder()
    wanted, _ = on_ranks(directory, 1, 1, answers, tokenizer_dir=folder)
    found, _ = on_ranks(directory, tensor, stages, answers, pipelined, tokenizer_dir=folder)
    assert found == wanted
    for tokens, _ in wanted[:-1]:
        assert tokens[-1] in (END, 0) and re.fullmatch(PATTERN, tiny_tokenizer().decode(tokens[:-1]))
