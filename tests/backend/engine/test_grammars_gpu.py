"""Answers that obey a grammar on a GPU: forwards as CUDA graphs, one step ahead of the masks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backend.engine.grammar_models import (
    END,
    OTHER_END,
    constrained_engine,
    random_model,
    sampled,
    tokenizer_folder,
)
from tests.backend.engine.loop_in_thread import run_loop
from tests.checkpoints import save, tiny_tokenizer
from tests.kernels.peer_process import on_ranks
from tests.waiting import wait_until
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire.messages import SequenceRequest, Submit
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

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


def late_on_ranks(directory: Path, meeting: Path, tokenizer: Path, rank: int, world: int, exchange) -> str:
    """Answer on one of several tensor ranks; return what is wrong, else ""."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = ProcessRanks(rank, world, 1, f"file://{meeting}", device)
    try:
        model = read_model_config(directory)
        sizes = dict(max_sequences=32, max_step_tokens=64, max_sequence_tokens=512, cache_bytes=16 << 20)
        config = resolve(EngineConfig(**sizes, device="cuda", data_type="fp32"), model, device)
        engine = load_engine(directory, model, config, ranks, device)
        if rank > 0:
            follow(engine, RankStatus())
            return ""
        try:
            return _late_on_rank_0(OfflineEngine(engine, tokenizer_dir=tokenizer))
        finally:
            ranks.broadcast_plan(None)
    finally:
        exchange(b"done")
        ranks.close()


def _late_on_rank_0(offline: OfflineEngine) -> str:
    grammars, limits = offline.scheduler.grammars, replace(offline.scheduler.limits, late_masks=True)
    offline.scheduler, found = Scheduler(limits, time.monotonic, grammars=grammars), []
    for params in ({}, {"top_k": 20, "top_p": 0.8, "return_log_probs": True}):
        texts, late, missed = answers(offline, **params)
        check(texts)
        found.append(f"{late} rows late, {missed} missed")
        if not late:
            return "no row was sampled late"
    print("; ".join(found), flush=True)
    grammars.close()
    return ""


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


def test_two_tensor_ranks_sample_late(tmp_path: Path) -> None:
    """The ranks use two GPUs or share one; the vocabulary is split at 320 of 640 ids."""
    plan_conversion(open_checkpoint(str(save(random_model(layers=2), tmp_path / "hf")))).write(tmp_path / "w")
    work = partial(late_on_ranks, tmp_path / "w", tmp_path / "meeting", tokenizer_folder())
    assert on_ranks(2, work) == ["", ""]


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
