"""Ranks on nodes and GPUs, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tridecode.backend.config import EngineConfig
from tridecode.backend.engine.meeting import choose_gpu
from tridecode.backend.errors import ConfigError
from tridecode.backend.nodes.devices import count_visible
from tridecode.backend.nodes.spread import NodeGpus, engine_index, first_devices, ranks_per_node


def gpus(*rows: tuple[str, str, int]) -> dict[int, NodeGpus]:
    return {index: NodeGpus(f"node {index}", *row) for index, row in enumerate(rows)}


def test_each_node_has_as_many_ranks():
    assert ranks_per_node(8, 2) == 4
    with pytest.raises(ConfigError, match=r"is 3, and the job has 2 nodes; wanted a multiple of 2"):
        ranks_per_node(3, 2)


def test_nodes_that_see_the_same_gpus_take_turns():
    assert first_devices(gpus(("a", "", 4), ("b", "", 4)), 4) == {0: 0, 1: 0}
    assert first_devices(gpus(("a", "", 4), ("a", "", 4)), 2) == {0: 0, 1: 2}
    assert first_devices(gpus(("a", "0,1", 2), ("a", "2,3", 2)), 2) == {0: 0, 1: 0}
    assert first_devices(gpus(("a", "", 0), ("a", "", 0)), 2) == {0: 0, 1: 2}, "CPUs: nothing is counted"


@pytest.mark.parametrize(
    "rows, per_node, text",
    [
        ((("a", "", 4), ("b", "", 2)), 4, "node 1 shows 2 GPU(s); its 4 rank(s) want one each"),
        ((("a", "", 4), ("b", "", 2)), 4, "pipeline_para_size may be 4 at most"),
        ((("a", "", 2), ("a", "", 2)), 2, "node 1 shows 2 GPU(s), 2 of them for nodes before it"),
        ((("a", "", 0), ("b", "", 2)), 2, "node 0 shows 0 GPU(s)"),
    ],
)
def test_too_few_gpus_are_refused_with_what_would_fit(rows, per_node, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        first_devices(gpus(*rows), per_node)


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
    auto, named = EngineConfig(), EngineConfig(devices="3,1")
    assert [choose_gpu(auto, rank, 2, 0, 4) for rank in range(4)] == [0, 1, 0, 1]
    assert [choose_gpu(auto, rank, 2, 2, 4) for rank in (2, 3)] == [2, 3]
    assert [choose_gpu(named, rank, 2, 0, 4) for rank in range(2)] == [3, 1]
    with pytest.raises(ConfigError, match=re.escape("take GPUs 2 to 3; this node shows 3 GPU(s)")):
        choose_gpu(auto, 0, 2, 2, 3)
    assert choose_gpu(auto, 0, 1, 0, 0) is None and choose_gpu(EngineConfig(device="cpu"), 0, 1, 0, 4) is None


@pytest.mark.parametrize(
    "devices, local, count, text",
    [
        ("0,4", 2, 4, "GPU 4 is missing, this node shows 4 GPU(s) (CUDA_VISIBLE_DEVICES is '4,5,6,7')"),
        ("0", 2, 4, "wanted 2 numbers, one for each rank of a node"),
        ("0", 1, 0, "this node shows 0 GPU(s) (CUDA_VISIBLE_DEVICES is '4,5,6,7'); wanted GPUs, or"),
    ],
)
def test_a_missing_gpu_is_named(devices, local, count, text, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with pytest.raises(ConfigError, match=re.escape(text)):
        choose_gpu(EngineConfig(devices=devices), 0, local, 0, count)
