"""The study of log-probs runs on a tiny model, and its cases have the steps that it measures."""

from __future__ import annotations

import math

from tests.backend.engine.offline_models import offline_engine, prompts_of
from tests.backend.hf_models import llama
from tridecode.tools.bench.studies import log_probs


def test_every_case_has_steps_to_measure() -> None:
    model = llama(positions=512)
    rows = 4
    offline = offline_engine(model, "cpu", keep_logits=False, max_sequences=rows, max_step_tokens=256)
    prompts = prompts_of([130] * rows, model.config.vocab_size)
    for name, case in log_probs.ROWS.items():
        params = case(rows)
        assert len(params) == rows and (name == "nothing") == (params[0] == params[-1] == log_probs._PLAIN)
        assert math.isfinite(log_probs.decode_ms(offline.engine, prompts, params))
    for special in log_probs.PROMPTS.values():
        assert math.isfinite(log_probs.mixed_ms(offline.engine, prompts, special, count=3))
