"""The values that ranks compare when they join and while they serve."""

from __future__ import annotations

import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.ranks.agreement import (
    CHECK_STEPS,
    AgreementError,
    Meeting,
    PeerLost,
    PlanOrder,
    StepDigest,
    disagreement,
    facts_of,
    seal,
    unseal,
)
from tridecode.backend.engine.step.plan import LateSamples, StepPlan, StepResult
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire.messages import RankDigest

CPU = torch.device("cpu")


def plan(step: int) -> StepPlan:
    empty = np.zeros(0, np.int32)
    return StepPlan(step, empty, empty, empty, empty.reshape(0, 0), empty, empty, empty, empty, 0)


def facts(directory: Path, **settings: Any) -> dict[str, str]:
    case = FAMILIES["gpt2"]
    return facts_of(EngineConfig(**settings), model_config(case.config(**case.settings)), directory, CPU)


def meet(path: Path, of_each: list[dict[str, str]], limit_s: float = 5.0) -> list[BaseException | None]:
    """What `agree` raises on each rank; the ranks are threads with stores of their own."""
    raised: list[BaseException | None] = [None] * len(of_each)

    def run(rank: int) -> None:
        try:
            Meeting(dist.FileStore(str(path), len(of_each)), rank, len(of_each), limit_s).agree(of_each[rank])
        except TridecodeError as error:
            raised[rank] = error

    threads = [threading.Thread(daemon=True, target=run, args=(rank,)) for rank in range(len(of_each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return raised


def test_ranks_of_the_same_settings_agree(tmp_path):
    assert meet(tmp_path / "meeting", [facts(tmp_path)] * 3) == [None] * 3


def test_ranks_of_other_settings_are_named_with_both_values_on_every_rank(tmp_path):
    usual = facts(tmp_path)
    found = meet(tmp_path / "meeting", [usual, facts(tmp_path, block_tokens=8), usual])
    text = "the ranks disagree: block_tokens (config.pbtxt) is 8 on rank 1 and 32 on ranks 0, 2; wanted the "
    text += "same on all"
    assert [str(error) for error in found] == [text] * 3
    assert all(isinstance(error, AgreementError) for error in found)


def test_every_setting_that_changes_the_answers_is_a_fact(tmp_path):
    """Facts cover config.pbtxt, config.ini, the weights and the versions, but not the place where a rank
    runs."""
    usual = facts(tmp_path)
    assert facts(tmp_path, num_threads=3, lora_path="/a/folder", verify_weights="full") == {
        **usual,
        "lora_path": "a folder",
    }
    for name, value in {"data_type": "bf16", "tensor_para_size": 2, "max_sequences": 3}.items():
        assert facts(tmp_path, **{name: value})[f"{name} (config.pbtxt)"] == str(value)
    (tmp_path / "manifest.json").write_text("{}")
    assert facts(tmp_path)["manifest.json"] != usual["manifest.json"] == "nothing"
    assert usual["torch"] == torch.__version__ and usual["the protocol"].isdigit()
    case = FAMILIES["gpt2"]
    model = replace(model_config(case.config(**case.settings)), norm_eps=0.5)
    other = facts_of(EngineConfig(), model, tmp_path, CPU)
    assert other["norm_eps (config.ini)"] == "0.5" != usual["norm_eps (config.ini)"]


def test_a_rank_of_another_version_lacks_a_fact():
    found = disagreement([{"torch": "2", "new": "1"}, {"torch": "2"}])
    assert found == "the ranks disagree: new is nothing on rank 1 and 1 on rank 0; wanted the same on all"
    assert disagreement([{"torch": "2"}, {"torch": "2"}]) == ""


def test_a_rank_that_does_not_come_is_named(tmp_path):
    told: list[tuple[str, list[int]]] = []
    store = dist.FileStore(str(tmp_path / "meeting"), 3)
    meeting = Meeting(store, 1, 3, 0.2, lambda what, ranks: told.append((what, ranks)))
    with pytest.raises(PeerLost, match=r"rank 1 has waited 0.2 s, joining, for ranks 0, 2"):
        meeting.agree({})
    assert told == [("joining", [0, 2])]


def test_plans_come_in_order_and_whole():
    order = PlanOrder(2)
    for step in (7, 8, 9):
        order.check(plan(step))
    for step in (9, 11):
        with pytest.raises(TridecodeError, match=rf"rank 2 got plan {step} after plan 9; wanted 10"):
            order.check(plan(step))
    late = LateSamples(9, [], np.zeros((0, 0), np.int32))
    assert order.check(late) is late and order.check(late) is late  # the order of plans is unchanged
    with pytest.raises(TridecodeError, match="rank 2 got late samples of plan 8 after plan 9"):
        order.check(LateSamples(8, [], late.masks))
    order.check(plan(10))
    sealed = seal(b"a plan")
    assert unseal(sealed) == b"a plan"
    for index in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[index] ^= 4
        with pytest.raises(TridecodeError, match="is damaged: digest"):
            unseal(bytes(damaged))


def test_a_digest_covers_all_tokens_and_at_times_the_state():
    sent: list[RankDigest] = []
    status, state = RankStatus(), torch.arange(4)
    digest = StepDigest(3, 1, 0, status, sent.append)
    tokens = np.arange(2 * CHECK_STEPS, dtype=np.int32)
    for step in range(1, 2 * CHECK_STEPS):
        digest.launched(plan(step), lambda: [state])
        digest.committed(plan(step), StepResult(tokens[step : step + 1], np.zeros(1)))
        assert status.digest == (step, zlib.crc32(tokens[1 : step + 1].tobytes()))
    (found,) = sent
    wanted = zlib.crc32(tokens[1 : CHECK_STEPS + 1].tobytes())
    assert found == RankDigest(3, 1, CHECK_STEPS, wanted, 0, zlib.crc32(state.numpy().tobytes()))
    state[2] ^= 1
    assert zlib.crc32(state.numpy().tobytes()) != found.state
