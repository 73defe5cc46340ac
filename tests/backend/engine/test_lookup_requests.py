"""Drafts in rows with adapters, and in requests that one engine begins and another continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.test_adapters import ADAPTERS, engine_over, written
from tests.backend.engine.test_draft_steps import SIZES
from tests.backend.engine.test_resumption import check_equal, finish, moved, submitted
from tests.backend.hf_models import gpt2
from tests.checkpoints import FAMILIES, greedy
from tests.lora_adapters import make_adapter
from tridecode.backend.engine.device import preparation
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest

NEW = 20


@pytest.fixture(autouse=True)
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get every draft, whatever the steps of this machine cost."""
    monkeypatch.setattr(preparation, "measured_costs", lambda engine, most_queries: None)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_of_adapters_keep_their_tokens_and_find_answers_of_their_own(
    family: str, tmp_path: Path
) -> None:
    model = FAMILIES[family]()
    models = {"": model}
    for name, settings in ADAPTERS.items():
        models[name] = make_adapter(model, tmp_path / "adapters" / name, **settings)
    sizes = dict(max_sequences=24, max_step_tokens=48, speculation="lookup")
    offline: OfflineEngine = engine_over(written(model, tmp_path), tmp_path / "adapters", **sizes)
    offline.engine.on_logits = None
    prompts = prompts_of([9, 4], model.config.vocab_size)
    asked = [(name, prompt) for prompt in prompts for name in models]
    learning = offline.scheduler.planner.drafts.learning
    before = 0
    for _ in range(2):
        before = learning.accepted["lookup"]
        params = SamplingParams(max_tokens=NEW)
        numbers = [offline.submit(prompt, params, name) for name, prompt in asked]
        offline.run()
        for (name, prompt), number in zip(asked, numbers):
            assert offline.generations[number].tokens == greedy(models[name], prompt, NEW)[0], name
    offline.engine.close()
    assert learning.accepted["lookup"] - before > NEW * len(asked) / 2


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_another_engine_continues_with_drafts_and_the_same_tokens(steps: int, sampled: bool) -> None:
    model = gpt2()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW, return_log_probs=True, seed=3)
    if sampled:
        params = replace(params, temperature=1.1, top_k=0, presence_penalty=0.5)

    def requests(drafts: list[list[int]]) -> list[list[SequenceRequest]]:
        found = []
        for prompt, tokens in zip(prompts, drafts):
            ids = np.asarray(prompt, np.int32).tobytes()
            found.append([SequenceRequest(ids, replace(params, draft_tokens=tokens))])
        return found

    plain = finish(*submitted(model, requests([[]] * 3), **SIZES))
    answers = [one["tokens", 0] for one in plain]
    if not sampled:
        assert answers == [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    check_equal(moved(model, requests(answers), steps, speculation="lookup", **SIZES), plain)
