"""The engines that instance_group makes: their number, the one of each door, and their GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridecode.backend.configuration.engine_instances import (
    InstanceGroup,
    instance_number,
    num_engines,
    read_groups,
)

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
