"""Draft models, heads and GLIDE layers draft for sequences that obey a grammar: this changes the number of
steps and nothing else."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest

from tests.backend.engine.draft_heads import trained_heads
from tests.backend.engine.glide_layers import random_glide
from tests.backend.engine.grammar_models import PADDED_VOCAB, constrained_engine, random_model, sampled
from tests.backend.engine.offline_models import run_in_flight
from tests.backend.engine.test_grammar_drafts import (
    PROMPT,
    SIZES,
    TOKENIZER,
    assert_same,
    counted,
    every_draft,
    ruled,
    run,
    submitted,
)
from tests.backend.engine.test_lookup import learning_of
from tests.checkpoints import TINY_VOCAB
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.weights.draft_files import TrainedDraft
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.tools.train_draft.texts import Text

__all__ = ["every_draft"]  # fixture
#: a drafter knows no masks: only letters and spaces are likely, which the grammars allow
BIAS = {
    token: -100.0
    for token in range(PADDED_VOCAB)
    if token >= TINY_VOCAB or not re.fullmatch("[a-z ]+", TOKENIZER.decode([token]))
}
TEXT = StructuredOutput("regex", "(?s:.{60,150})")
#: forced keys between free texts
_KEYS = ["name_of_the_passenger", "departure_from_the_harbour", "arrival_at_the_other_harbour"]
_FORM = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 30} for key in _KEYS},
    "required": _KEYS,
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
FORM = StructuredOutput("json_schema", json.dumps(_FORM))


def biased(**values) -> SamplingParams:
    return sampled(logit_bias=BIAS, **{"max_tokens": 90, **values})


def requests() -> list[tuple[StructuredOutput | None, SamplingParams]]:
    found: list[tuple[StructuredOutput | None, SamplingParams]] = []
    for seed, output in enumerate((TEXT, FORM)):
        found += [
            (output, biased(temperature=0.0, return_log_probs=True)),
            (output, biased(temperature=0.9, seed=seed)),
            (output, biased(temperature=0.0, repetition_penalty=1.3, top_log_probs=2)),
        ]
    return [*found, (None, biased(temperature=0.0))]


@functools.cache
def plain_answers() -> list[Generation]:
    offline = constrained_engine(**SIZES)
    try:
        return run(offline, requests())
    finally:
        offline.scheduler.grammars.close()


@functools.cache
def heads() -> TrainedDraft:
    """Heads that know the greedy answers by heart."""
    texts = [
        Text(np.array([*PROMPT, *one.tokens], np.int32), len(PROMPT))
        for one, (_, params) in zip(plain_answers(), requests())
        if params.temperature == 0.0
    ]
    return trained_heads(random_model(), texts)[1]


def drafting(kind: str) -> OfflineEngine:
    settings: dict = {"speculation": kind}
    if kind.endswith("draft"):
        settings["draft"] = random_model()
    else:
        settings["trained"] = heads() if kind.endswith("heads") else random_glide(random_model())
    return constrained_engine(**{**SIZES, "max_draft_tokens": 4}, **settings)


@pytest.mark.parametrize("kind", ["draft", "heads", "glide", "lookup+draft", "lookup+heads", "lookup+glide"])
def test_each_drafter_keeps_the_answers(kind: str) -> None:
    wanted, offline = plain_answers(), drafting(kind)
    try:
        for _ in range(2):
            found = run(offline, requests())
            assert_same(found, wanted)
            for one, other in zip(found, wanted):
                assert [top.ids for top in one.top_log_probs] == [top.ids for top in other.top_log_probs]
        learning = learning_of(offline)
        assert learning.accepted["grammar"] > 60
        if not kind.startswith("lookup"):
            assert learning.drafted[kind] > 60
        index = offline.scheduler.cache.index
        assert index.num_available == index.num_blocks, "blocks leaked"
    finally:
        offline.scheduler.grammars.close()


@pytest.mark.parametrize("output", [TEXT, FORM], ids=["free text", "keys between texts"])
@pytest.mark.parametrize("kind", ["draft", "heads"])
def test_drafts_that_the_grammar_allows_are_right(kind: str, output: StructuredOutput) -> None:
    """The target is its own draft model, so that wrong drafts show a wrong cache; the heads are overfitted to
    the answer."""
    offline = drafting(kind)
    try:
        plans = counted(offline)
        (found,) = run(offline, [(output, biased(temperature=0.0, return_perf_metrics=True))])
        learning = learning_of(offline)
        drafted, accepted = learning.drafted[kind], learning.accepted[kind]
        assert drafted >= 20 and accepted >= (0.95 if kind == "draft" else 0.5) * drafted
        assert len(plans) < 0.6 * len(found.tokens)
        assert any(len(part.masked) for plan in plans if (part := plan.part(Drafting)) is not None)
        assert found.perf is not None
        assert found.perf.draft_tokens == drafted + learning.drafted["grammar"]
    finally:
        offline.scheduler.grammars.close()


def test_steps_in_flight_and_every_rule_keep_the_answers() -> None:
    plain = constrained_engine(**SIZES)
    asked = [*requests(), *ruled()[:12]]
    wanted = run(plain, asked)
    plain.scheduler.grammars.close()
    for kind in ("draft", "lookup+heads"):
        offline = drafting(kind)
        numbers = submitted(offline, asked)
        run_in_flight(offline, 2)
        assert_same([offline.generations[number] for number in numbers], wanted)
        offline.scheduler.grammars.close()
