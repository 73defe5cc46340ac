"""Ranks on nodes and GPUs, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.rank_gpus import SHARE, Demand
from tridecode.backend.engine.ranks.join_meeting import choose_gpu
from tridecode.backend.nodes.devices import count_visible
from tridecode.backend.nodes.rank_spread import NodeGpus, engine_index, first_devices, ranks_per_node


def gpus(*rows: tuple[str, str, int]) -> dict[int, NodeGpus]:
    return {index: NodeGpus(f"node {index}", *row) for index, row in enumerate(rows)}


def test_each_node_has_as_many_ranks():
    assert ranks_per_node(8, 2) == 4
    with pytest.raises(ConfigError, match=r"is 3, and the job has 2 nodes; wanted a multiple of 2"):
        ranks_per_node(3, 2)


def test_nodes_that_see_the_same_gpus_take_turns():
    eight, four = Demand(8, 1, nodes=2), Demand(2, 2, nodes=2)
    assert first_devices(gpus(("a", "", 4), ("b", "", 4)), eight) == {0: 0, 1: 0}
    assert first_devices(gpus(("a", "", 4), ("a", "", 4)), four) == {0: 0, 1: 2}
    assert first_devices(gpus(("a", "0,1", 2), ("a", "2,3", 2)), four) == {0: 0, 1: 0}
    assert first_devices(gpus(("a", "", 0), ("a", "", 0)), four) == {0: 0, 1: 2}, "CPUs: nothing is counted"
    assert first_devices(gpus(("a", "", 4), ("b", "", 4)), four, "3,1") == {0: 0, 1: 0}


@pytest.mark.parametrize(
    "rows, degree, devices, text",
    [
        (
            (("a", "", 4), ("b", "", 2)), (8, 1), "auto",
            "tensor_para_size 8 x pipeline_para_size 1 needs 4 GPUs on each of 2 nodes; node 1 shows 2: "
            "tensor_para_size 4 would fit",
        ),
        ((("a", "", 4), ("b", "", 2)), (4, 2), "auto", "node 1 shows 2: pipeline_para_size 1 would fit"),
        ((("a", "", 2), ("a", "", 2)), (4, 1), "auto", "shows 2 to 2 nodes: tensor_para_size 2 would fit"),
        ((("a", "", 0), ("b", "", 2)), (4, 1), "auto", "node 0 shows 0: wanted more GPUs"),
        ((("a", "", 1), ("b", "", 1)), (4, 1), "auto", "node 0 shows 1: tensor_para_size 2 would fit"),
        ((("a", "", 2), ("b", "", 1)), (4, 1), "0,1", "is 0,1, which names GPU 1; node 1 shows 1"),
        ((("a", "", 2), ("b", "", 2)), (4, 1), "0", "devices names 1: tensor_para_size 2 would fit"),
        ((("a", "", 2), ("b", "", 2)), (4, 1), "1,1", "names GPU 1 twice"),
        ((("a", "", 2), ("a", "", 2)), (2, 1), "1", "is 1, which each of 2 nodes on one machine takes"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused_with_what_would_fit(rows, degree, devices, text, monkeypatch):
    monkeypatch.delenv(SHARE, raising=False)
    with pytest.raises(ConfigError, match=re.escape(text)):
        first_devices(gpus(*rows), Demand(*degree, nodes=2), devices)


def test_nodes_on_one_machine_share_a_gpu_only_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv(SHARE, "1")
    assert first_devices(gpus(("a", "", 1), ("a", "", 1)), Demand(2, 1, nodes=2), "0") == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "visible, wanted", [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,7,1", 1), ("GPU-ab", 1)]
)
def test_visible_gpus_are_counted_as_cuda_does(visible, wanted, tmp_path: Path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_visible(tmp_path) == wanted


def test_engines_of_a_repository_have_ports_in_the_order_of_their_names(tmp_path: Path):
    for name, key in (
        ("beta", "tensor_para_size"),
        ("alpha", "tensor_para_size"),
        ("aa_door", "engine_model"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'parameters {{ key: "{key}" }}')
    assert [engine_index(str(tmp_path / name)) for name in ("alpha", "beta")] == [0, 1]


def test_a_rank_takes_the_gpu_of_its_place_on_the_node():
    auto = EngineConfig(tensor_para_size=4)
    named = EngineConfig(tensor_para_size=2, devices="3,1")
    assert [choose_gpu(auto, rank, 2, 0, 4) for rank in range(4)] == [0, 1, 0, 1]
    assert [choose_gpu(auto, rank, 2, 2, 4) for rank in (2, 3)] == [2, 3]
    assert [choose_gpu(named, rank, 2, 0, 4) for rank in range(2)] == [3, 1]
    assert choose_gpu(auto, 0, 1, 0, 0) is None
    assert choose_gpu(EngineConfig(device="cpu", tensor_para_size=4), 0, 4, 0, 2) is None


@pytest.mark.parametrize(
    "tensor, devices, first, count, text",
    [
        (4, "auto", 0, 2, "CUDA_VISIBLE_DEVICES (4,5,6,7) shows 2: tensor_para_size 2 would fit"),
        (2, "auto", 2, 3, "shows 3, 2 of them for ranks before these: tensor_para_size 1 would fit"),
        (2, "0,4", 0, 4, "which names GPU 4; CUDA_VISIBLE_DEVICES (4,5,6,7) shows 4; wanted numbers"),
        (2, "0", 0, 4, "needs 2 GPUs; parameter devices names 1"),
        (2, "0,0", 0, 4, "names GPU 0 twice"),
        (1, "0", 0, 0, "CUDA_VISIBLE_DEVICES (4,5,6,7) shows 0; wanted GPUs, or devices = auto"),
    ],
)  # fmt: skip
def test_a_rank_without_a_gpu_of_its_own_says_what_torch_sees(
    tensor, devices, first, count, text, monkeypatch
):
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = EngineConfig(tensor_para_size=tensor, devices=devices)
    with pytest.raises(ConfigError, match=re.escape(text)):
        choose_gpu(config, 0, tensor, first, count)
