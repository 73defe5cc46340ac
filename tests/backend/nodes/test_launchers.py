"""The place among the nodes, from the variables that real launchers set."""

from __future__ import annotations

import re

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.nodes.launchers import NodePlace, find_place

SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, (1, 2)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            None,
        ),  # FasterTransformer's `mpirun -n 1`
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"}, (3, 4)),
        ({**SLURM, "PMIX_RANK": "2"}, (2, 4)),  # srun --mpi=pmix: the size of the step, not of the allocation
        (SLURM, (2, 4)),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"},
            None,
        ),  # a batch script is not a step
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun --pty bash
        ({**SLURM, "TRIDECODE_NODES": "none"}, None),  # servers of their own under srun
    ],
)
def test_the_place_follows_from_the_launcher_s_variables(environment, wanted):
    place = find_place(environment)
    assert (place and (place.index, place.size)) == wanted
    assert place is None or place.by_mpi


def test_the_place_without_mpi():
    environment = {"TRIDECODE_NODES": "gpu-1:7117, gpu-2,gpu-3:1", "TRIDECODE_NODE": "2"}
    environment["TRIDECODE_NODES_SECRET_FILE"] = "/s"
    hosts = ("gpu-1", "gpu-2", "gpu-3")
    assert find_place(environment) == NodePlace(2, 3, "TRIDECODE_NODES", hosts, 7117, "/s")
    only_first = {**environment, "TRIDECODE_NODES": "[fd00::1]:80", "TRIDECODE_NODES_SIZE": "8"}
    assert find_place(only_first) == NodePlace(2, 8, "TRIDECODE_NODES", ("fd00::1",), 80, "/s")


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is 2; wanted"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK = 'x'; wanted a whole number"),
        ({"TRIDECODE_NODES": "a,b", "TRIDECODE_NODE": "0"}, "begins with 'a'; wanted HOST:PORT"),
        ({"TRIDECODE_NODES": "a:99999,b", "TRIDECODE_NODE": "0"}, "wanted HOST:PORT"),
        ({"TRIDECODE_NODES": "a:1,b"}, "TRIDECODE_NODE = ''"),
        ({"TRIDECODE_NODES": "a:1,b", "TRIDECODE_NODE": "0"}, "TRIDECODE_NODES_SECRET_FILE is not"),
        ({"TRIDECODE_NODES": "a:1,b", "TRIDECODE_NODES_SIZE": "3"}, "names 2 hosts and TRIDECODE_NODES_SIZE"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named(environment, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        find_place(environment)
