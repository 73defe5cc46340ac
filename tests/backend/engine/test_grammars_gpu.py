"""Answers that obey a grammar on a GPU: forwards as CUDA graphs, one step ahead of the masks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.backend.engine.grammar_models import END, OTHER_END, constrained_engine, sampled
from tests.backend.engine.loop_in_thread import run_loop
from tests.checkpoints import tiny_tokenizer
from tests.waiting import wait_until
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SequenceRequest, Submit
from tridecode.backend.wire.structured_output import StructuredOutput

pytestmark = pytest.mark.gpu

PATTERN = "[a-z]{3}-[0-9]{2,9}"
ARRAY = {"type": "array", "items": {"enum": ["x", 12, None]}, "maxItems": 9}
OUTPUTS = [
    None,
    StructuredOutput("regex", PATTERN),
    StructuredOutput("json_schema", json.dumps(ARRAY)),
    StructuredOutput("choice", '["yes", "no, but"]'),
]
COUNT = 24


@pytest.fixture
def offline() -> Iterator[OfflineEngine]:
    made = constrained_engine(device="cuda", max_sequences=32, max_step_tokens=64)
    yield made
    made.scheduler.grammars.close()


def answers(offline: OfflineEngine, **params: object) -> tuple[list[str], int, int]:
    """Return the text of each answer, "" for one that was cut, how many rows were sampled late, and how many
    were computed again.
    """
    late = missed = 0
    sample_late, engine = offline.engine.sample_late, offline.engine

    def counted(plan, pending, rows, masks):
        nonlocal late, missed
        late, missed = late + len(rows), missed + len(plan.missed)
        return sample_late(plan, pending, rows, masks)

    engine.sample_late = counted  # type: ignore[method-assign]
    tokenizer, prompt = tiny_tokenizer(), np.array([5, 6, 7], "<i4").tobytes()
    with run_loop(engine, offline.scheduler) as running:
        for i in range(COUNT):
            wanted = sampled(**{"seed": i, "max_tokens": 60, **params})
            request = SequenceRequest(prompt, wanted, structured_output=OUTPUTS[i % len(OUTPUTS)])
            running.doors.put(Submit(i, [request]))
        wait_until(lambda: len(running.doors.ends) == COUNT, 60.0)
        assert set(running.doors.ends.values()) <= {"end_id", "length"}
        texts = []
        for i in range(COUNT):
            tokens = running.doors.tokens[i]
            if running.doors.ends[i] == "end_id":
                assert tokens.pop() in (END, OTHER_END)
                texts.append(tokenizer.decode(tokens))
            else:
                texts.append("")
    return texts, late, missed


def check(texts: list[str]) -> None:
    assert all(re.fullmatch(PATTERN, text) for text in texts[1::4])
    assert all(text in ("yes", "no, but") for text in texts[3::4])
    arrays = [json.loads(text) for text in texts[2::4] if text]
    assert all(len(array) <= 9 and set(array) <= {"x", 12, None} for array in arrays)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 1}, {"top_k": 20, "top_p": 0.8}, {"repetition_penalty": 1.2, "return_log_probs": True}],
)
def test_answers_are_valid_and_take_a_step_a_token(offline: OfflineEngine, params: dict[str, object]) -> None:
    texts, late, _ = answers(offline, **params)
    check(texts)
    assert params.get("top_k") == 1 or sum(map(bool, texts[2::4])) >= COUNT // 8
    assert late > 0  # how many masks come in time depends on the machine


def test_rows_whose_masks_are_late_are_computed_again(
    offline: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, advance = [0], Guidance.advance

    def slow(self: Guidance, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] % 4 == 0:
            time.sleep(0.015)
        return advance(self, *given)

    monkeypatch.setattr(Guidance, "advance", slow)
    texts, _, missed = answers(offline)
    check(texts)
    assert missed > 5
