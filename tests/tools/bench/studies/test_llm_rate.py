"""LLM.generate against its engine alone: all tokens come, and texts cost little processor time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.llm.models import tiny_checkpoint
from tridecode import LLM
from tridecode.tools.bench.studies.llm_rate import make_prompts, rates

#: processor time of LLM.generate a token, in microseconds; 15 were measured, 9 of the engine's link alone
CPU_US = 150.0


@pytest.mark.slow
def test_a_token_of_a_thousand_prompts_costs_little_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with LLM(
        tiny_checkpoint(tmp_path), cache=tmp_path / "cache", max_num_seqs=64, log=tmp_path / "log"
    ) as llm:
        texts = make_prompts(llm, 1000, 8)
        assert len(set(texts)) == 1000
        ((ours, bare),) = rates(llm, texts, 16, repeats=1)
    assert ours.tokens_per_s > 0 and bare.tokens_per_s > 0
    assert ours.cpu_us <= CPU_US
