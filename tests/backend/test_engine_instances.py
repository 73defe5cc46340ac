"""The engines that instance_group makes: their number, the one of each door, and their GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tridecode.backend.engine_instances import (
    InstanceGroup,
    engine_gpus,
    instance_number,
    num_engines,
    read_groups,
)
from tridecode.backend.errors import ConfigError

TEXT = """
name: "fastertransformer"  # instance_group { count: 9 }
instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_GPU gpus: [ 3, 1 ] } ]
model_transaction_policy { decoupled: true }
unknown_to_this_version < a: 1 b { c: "instance_group { count: 5 }" } >
"""


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        (TEXT, [InstanceGroup(2), InstanceGroup(1, (3, 1))]),
        ('name: "a"', [InstanceGroup(1)]),
        ("instance_group [{ count: 0 }]", [InstanceGroup(1)]),
        ("instance_group [{ count: 2 ", [InstanceGroup(1)]),  # the engine's supervisor reports the error
    ],
)
def test_groups_are_read_as_triton_reads_them(tmp_path: Path, text: str, groups: list[InstanceGroup]) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    assert list(read_groups(tmp_path)) == groups
    assert num_engines(groups) == sum(group.count for group in groups)


def test_an_absent_file_has_one_engine(tmp_path: Path) -> None:
    assert read_groups(tmp_path) == (InstanceGroup(),)


@pytest.mark.parametrize(
    ("name", "number"),
    [("ft_0_0", 0), ("ft_0_1", 1), ("own_0", 2), ("ft_2_0", 3), ("ft_2_1", 4), ("other", 0), ("ft_2_x", 0)],
)
def test_a_door_has_the_number_of_its_instance(name: str, number: int) -> None:
    groups = [{"name": "ft_0", "count": 2}, {"name": "own", "count": 1}, {"name": "ft_2", "count": 2}]
    assert instance_number(name, {"instance_group": groups}) == number


@pytest.mark.parametrize(
    ("groups", "ranks", "devices", "visible", "wanted"),
    [
        ([InstanceGroup(2)], 2, "0,1,2,3", 4, [(0, 1), (2, 3)]),
        ([InstanceGroup(2)], 2, "7,5,6,4", 8, [(7, 5), (6, 4)]),
        ([InstanceGroup(2)], 2, "auto", 4, [(), ()]),  # 0, 1 and 2, 3 by their order
        ([InstanceGroup(2)], 2, "auto", 0, [(), ()]),  # a CPU
        ([InstanceGroup(1, (2, 0)), InstanceGroup(1, (3, 1))], 2, "auto", 4, [(2, 0), (3, 1)]),
        ([InstanceGroup(2, (0, 1)), InstanceGroup(1, (2,))], 1, "auto", 4, [(0,), (1,), (2,)]),
        ([InstanceGroup(1)], 2, "1,0", 2, [(1, 0)]),
    ],
)
def test_each_engine_has_gpus_of_its_own(groups, ranks, devices, visible, wanted) -> None:
    found = [engine_gpus(groups, number, ranks, devices, visible) for number in range(num_engines(groups))]
    assert found == wanted


@pytest.mark.parametrize(
    ("groups", "ranks", "devices", "visible", "text"),
    [
        (
            [InstanceGroup(2)], 2, "auto", 3,
            "2 engines of 2 rank(s) each, which take 4 GPUs; this node shows 3; wanted 1 instance(s) or "
            "tensor_para_size x pipeline_para_size of 1 at most",
        ),
        ([InstanceGroup(3)], 4, "auto", 2, "this node shows 2; wanted more GPUs (CUDA_VISIBLE_DEVICES)"),
        ([InstanceGroup(2)], 1, "3", 8, "parameter devices names 1; wanted 1 instance(s)"),
        ([InstanceGroup(2)], 1, "3,3", 8, "devices is 3,3; wanted each GPU once for the 2 engines"),
        ([InstanceGroup(1, (0,)), InstanceGroup(1, (0,))], 1, "auto", 2, "lists GPU 0 twice"),
        ([InstanceGroup(2, (0, 1))], 2, "auto", 8, "lists 2 GPU(s) for 2 engine(s) of 2 rank(s)"),
        ([InstanceGroup(1, (0,)), InstanceGroup(1)], 1, "auto", 8, "lists 0 GPU(s) for 1 engine(s)"),
        ([InstanceGroup(1, (0,))], 1, "1", 8, "both parameter devices and gpus"),
    ],
)  # fmt: skip
def test_engines_without_enough_gpus_are_refused_with_what_would_fit(
    groups, ranks, devices, visible, text
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        engine_gpus(groups, 0, ranks, devices, visible)
