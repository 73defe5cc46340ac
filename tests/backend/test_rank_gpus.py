"""Which GPUs ranks take, and that a rank without one of its own is refused before any rank starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_instances import InstanceGroup, num_engines
from tridecode.backend.configuration.rank_gpus import SHARE, Demand, engine_gpus, shown_here
from tridecode.backend.supervisor import engine_settings
from tridecode.backend.supervisor.engine_life import EngineLife

ONE, TWO = [InstanceGroup(1)], [InstanceGroup(2)]
LISTS = [InstanceGroup(1, (2, 0)), InstanceGroup(1, (3, 1))]


def take(groups, degree, devices, visible, number=0) -> tuple[int, ...]:
    demand = Demand(*degree, num_engines(groups))
    return engine_gpus(groups, number, demand, devices, visible, f"this node has {visible}")


@pytest.mark.parametrize(
    ("groups", "degree", "devices", "visible", "wanted"),
    [
        (TWO, (2, 1), "0,1,2,3", 4, [(0, 1), (2, 3)]),
        (TWO, (1, 2), "7,5,6,4", 8, [(7, 5), (6, 4)]),
        (TWO, (2, 1), "auto", 4, [(), ()]),  # 0, 1 and 2, 3 by their order
        (TWO, (2, 1), "auto", 0, [(), ()]),  # a CPU
        (LISTS, (2, 1), "auto", 4, [(2, 0), (3, 1)]),
        ([InstanceGroup(2, (0, 1)), InstanceGroup(1, (2,))], (1, 1), "auto", 4, [(0,), (1,), (2,)]),
        (ONE, (2, 1), "1,0", 2, [(1, 0)]),
        (ONE, (2, 2), "auto", 4, [()]),
        (ONE, (2, 2), "auto", 0, [()]),  # a CPU, or devices that have no file: the ranks count again
    ],
)
def test_each_engine_has_gpus_of_its_own(groups, degree, devices, visible, wanted) -> None:
    found = [take(groups, degree, devices, visible, number) for number in range(num_engines(groups))]
    assert found == wanted


@pytest.mark.parametrize(
    ("groups", "degree", "devices", "visible", "text"),
    [
        (
            ONE, (4, 1), "auto", 2,
            "tensor_para_size 4 x pipeline_para_size 1 needs 4 GPUs; this node has 2: tensor_para_size 2 "
            "would fit",
        ),
        (ONE, (2, 2), "auto", 3, "needs 4 GPUs; this node has 3: pipeline_para_size 1 would fit"),
        (ONE, (3, 2), "auto", 1, "this node has 1: tensor_para_size 1 x pipeline_para_size 1 would fit"),
        (ONE, (3, 1), "auto", 2, "needs 3 GPUs; this node has 2: tensor_para_size 1 would fit"),
        (ONE, (1, 4), "auto", 3, "needs 4 GPUs; this node has 3: pipeline_para_size 2 would fit"),
        (ONE, (2, 1), "0", 4, "needs 2 GPUs; parameter devices names 1: tensor_para_size 1 would fit"),
        (ONE, (2, 1), "0,4", 4, "is 0,4, which names GPU 4; this node has 4; wanted numbers from 0 to 3"),
        (ONE, (2, 1), "0,0", 4, "names GPU 0 twice; wanted a GPU for each rank (TRIDECODE_SHARE_GPUS=1"),
        (
            TWO, (2, 1), "auto", 3,
            "2 engines (instance_group) of tensor_para_size 2 x pipeline_para_size 1 need 4 GPUs; this node "
            "has 3: 1 instance(s) or tensor_para_size 1 would fit",
        ),
        ([InstanceGroup(3)], (4, 1), "auto", 2, "need 12 GPUs; this node has 2: wanted more GPUs (CUDA_VIS"),
        (TWO, (1, 1), "3", 8, "need 2 GPUs; parameter devices names 1: 1 instance(s) would fit"),
        (TWO, (1, 1), "3,3", 8, "parameter devices is 3,3, which names GPU 3 twice"),
        ([InstanceGroup(1, (0,))] * 2, (1, 1), "auto", 2, "instance_group names GPU 0 twice"),
        (LISTS, (2, 1), "auto", 3, "instance_group names GPU 3; this node has 3"),
        ([InstanceGroup(2, (0, 1))], (2, 1), "auto", 8, "lists 2 GPU(s) for 2 engine(s) of 2 rank(s)"),
        ([InstanceGroup(1, (0,)), InstanceGroup(1)], (1, 1), "auto", 8, "lists 0 GPU(s) for 1 engine(s)"),
        ([InstanceGroup(1, (0,))], (1, 1), "1", 8, "both parameter devices and gpus"),
    ],
)  # fmt: skip
def test_ranks_without_enough_gpus_are_refused_with_what_would_fit(
    groups, degree, devices, visible, text, monkeypatch
) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    with pytest.raises(ConfigError, match=re.escape(text)):
        take(groups, degree, devices, visible)


def test_ranks_share_a_gpu_only_where_that_is_asked_for(monkeypatch) -> None:
    monkeypatch.setenv(SHARE, "1")
    assert take(ONE, (2, 1), "0,0", 1) == (0, 0)
    assert take(TWO, (1, 1), "0,0", 1, 1) == (0,)
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        take(ONE, (2, 1), "auto", 1)


def test_no_rank_is_started_where_the_node_shows_too_few_gpus(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.pbtxt").write_text(
        'parameters { key: "tensor_para_size" value: { string_value: "4" } }\n'
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(engine_settings, "count_visible", lambda: 2)
    started: list[int] = []
    life = EngineLife(
        lambda: engine_settings.read_engine_settings(str(tmp_path)),
        lambda: 0,
        lambda epoch, settings, now: started.append(epoch),  # type: ignore[arg-type, return-value]
        lambda epoch: "",
        0,
    )
    life.tick(0.0)
    assert (life.phase, life.detail, started) == (
        "failed",
        "tensor_para_size 4 x pipeline_para_size 1 needs 4 GPUs; CUDA_VISIBLE_DEVICES (4,5) shows 2: "
        "tensor_para_size 2 would fit",
        [],
    )
    monkeypatch.setattr(engine_settings, "count_visible", lambda: 4)
    assert engine_settings.read_engine_settings(str(tmp_path)).world == 4


def test_the_number_of_gpus_is_said_with_its_reason(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shown_here(3) == "this node has 3"
