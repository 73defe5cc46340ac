"""The mixed load: its shares, and that it runs on a tiny model."""

from __future__ import annotations

import math

from tests.backend.engine.offline_models import offline_engine, prompts_of
from tests.backend.hf_models import llama
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.studies import mixed_load


def test_the_shares_are_those_of_the_case() -> None:
    params, adapters = mixed_load.fields_of(4000, *mixed_load.CASES["both"])
    assert 0.015 < sum(one.top_log_probs == 20 for one in params) / 4000 < 0.025
    assert 0.08 < sum(map(bool, adapters)) / 4000 < 0.12
    assert set(adapters) == {"", *map(str, range(8))}
    params, adapters = mixed_load.fields_of(4000, 0.0, 0.0)
    assert not any(adapters) and all(one.top_log_probs == -1 for one in params)


def test_a_load_with_log_probs_runs_to_its_end() -> None:
    model = llama(positions=512)
    offline = offline_engine(model, "cpu", keep_logits=False, max_sequences=4, max_step_tokens=256)
    prompts = prompts_of([30, 5, 60, 9, 20, 7], model.config.vocab_size)
    assert math.isfinite(
        mixed_load.load_ms(LoopRunner(offline.engine), prompts, [5, 9, 3, 7, 4, 6], (0.5, 0.0))
    )
