"""`tridecode doctor` finds each misconfiguration of a machine, and reads the machine's facts correctly."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.tools.doctor.doctors import CPU_MACHINE, CUDA, GIB, GPU_MACHINE, H100, gpu
from tridecode.backend.base.errors import ConfigError
from tridecode.tools.byte_sizes import in_words, parse_bytes
from tridecode.tools.doctor.gpus import Gpu, parse_smi
from tridecode.tools.doctor.machine import Doors, Kernels, Machine, inspect_machine
from tridecode.tools.doctor.machine_findings import machine_findings


def test_healthy_machines_have_no_findings():
    assert list(machine_findings(GPU_MACHINE, ranks=8)) == []
    assert list(machine_findings(CPU_MACHINE)) == []


#: trap: (change of GPU_MACHINE, ranks, severity, where, part of the finding, part of the advice)
TRAPS = {
    "torch without CUDA": (
        {"cuda": replace(CUDA, torch_cuda=None, visible=())}, 1, "error", "torch", "a CPU build",
        "CUDA build",
    ),
    "an old driver": (
        {"cuda": replace(CUDA, driver_cuda="12.4", visible=())}, 1, "error", "driver",
        "driver 580.65.06 for CUDA 12.4; torch for 13.0", "Update the driver",
    ),
    "an old driver that still works": (
        {"cuda": replace(CUDA, driver_cuda="12.9")}, 1, "warning", "driver", "CUDA 12.9; torch for 13.0",
        "update",
    ),
    "hidden GPUs": (
        {"cuda": replace(CUDA, visible=())}, 1, "error", "GPUs", "1 in nvidia-smi, 0 in torch",
        "CUDA_VISIBLE_DEVICES",
    ),
    "a GPU of before": ({"cuda": gpu(capability=70)}, 1, "error", "GPU 0", "compute capability 7.0", "cpu"),
    "a GPU in use": ({"cuda": gpu(used=30 * GIB)}, 1, "warning", "GPU 0", "30.00 GiB of 80", "nvidia-smi"),
    "MIG": ({"cuda": gpu(mig="Enabled")}, 1, "warning", "MIG", "enabled", "must be 1"),
    "no kernels": (
        {"kernels": Kernels("lib.so", error="not built")}, 1, "error", "lib.so", "not built", "kernels.build",
    ),
    "kernels of another binary interface": (
        {"kernels": Kernels("lib.so", error="lib.so has binary interface 3; api.h wants 4")}, 1, "error",
        "lib.so", "binary interface 3", "kernels.build",
    ),
    "kernels for another GPU": (
        {"kernels": Kernels("lib.so", "arch 80, nvcc 13.0, sources 0")}, 1, "error", "lib.so",
        "built for sm_80; GPU 0 is sm_90", "--arch 90",
    ),
    "two ranks without NCCL": ({"cuda": replace(CUDA, nccl=None)}, 2, "error", "torch", "no NCCL", "CUDA"),
    "locked memory for InfiniBand": (
        {"infiniband": True, "memlock": 64 << 10}, 2, "warning", "ulimit -l", "64.00 KiB", "memlock=-1",
    ),
    "docker's /dev/shm": (
        {"shm_total": 64 << 20, "shm_free": 64 << 20}, 1, "error", "/dev/shm", "64.00 MiB", "--shm-size",
    ),
    "a full /dev/shm": ({"shm_free": 1 << 20}, 1, "error", "/dev/shm", "1.00 MiB free", "Remove"),
    "leftovers of a killed server": ({"shm_leftovers": 9}, 1, "warning", "/dev/shm", "9 regions", "remove"),
    "few open files": ({"nofile": 1024}, 1, "warning", "ulimit -n", "1024", "ulimit -n 65536"),
    "a full disk": ({"disk_free": 5 << 20}, 1, "warning", "disk", "5.00 MiB free", "Free some"),
    "few CPUs": ({"cpus": 4}, 4, "warning", "CPUs", "4", "share them"),
    "few CPUs of a container": ({"cpu_limit": 1.5}, 1, "warning", "CPUs", "1.5", "share them"),
    "no server": (
        {"doors": Doors("p", "3.13", error="python stubs for 3.8, 3.9")}, 1, "error", "tritonserver",
        "stubs for 3.8", "text",
    ),
    "PYTHONPATH": (
        {"doors": replace(GPU_MACHINE.doors, pythonpath=True)}, 1, "warning", "PYTHONPATH", "set", "Install",
    ),
    "a taken port": (
        {"ports_taken": {"8001 (grpc)": "process 7 (tritonserver)"}}, 1, "warning", "port 8001",
        "taken by process 7", "--grpc-port",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_of_a_machine_is_found_alone(trap):
    change, ranks, severity, where, found, fix = TRAPS[trap]
    findings = list(machine_findings(replace(GPU_MACHINE, **change), ranks))
    assert len(findings) == 1, findings
    finding = findings[0]
    assert finding.severity == severity and finding.where.startswith(where)
    assert found in finding.found and finding.wanted and fix in finding.fix


def test_memory_of_a_container_is_told_apart_from_the_machines():
    (finding,) = machine_findings(replace(CPU_MACHINE, memory_limit=8 * GIB))
    assert "cgroup limit 8.00 GiB" in finding.found and "cache_bytes" in finding.fix


def test_kernels_for_all_architectures_fit_every_gpu():
    cuda = replace(CUDA, visible=(replace(H100, capability=86), H100))
    assert list(machine_findings(replace(GPU_MACHINE, cuda=cuda))) == []


def test_the_answer_of_nvidia_smi_is_read():
    rows = (
        "0, NVIDIA H200, 9.0, 143771, 4, 580.65.06, Disabled\n"
        "1, Tesla T4, 7.5, 15360, 448, 580.65.06, [N/A]\n"
        "an error in between\n"
    )
    assert parse_smi(rows) == (
        Gpu(0, "NVIDIA H200", 90, 143771 << 20, 4 << 20, "580.65.06", "Disabled"),
        Gpu(1, "Tesla T4", 75, 15360 << 20, 448 << 20, "580.65.06", "[N/A]"),
    )


def test_a_failing_nvidia_smi_is_told_with_its_text(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "Driver/library version mismatch" in inspect_machine().cuda.smi_error


@pytest.fixture(scope="module")
def this_machine() -> Machine:
    return inspect_machine(Path(__file__).parent)


def test_the_facts_of_this_machine_are_those_that_psutil_tells(this_machine):
    assert this_machine.memory == psutil.virtual_memory().total
    assert this_machine.cpus == len(psutil.Process().cpu_affinity())
    assert this_machine.shm_total == psutil.disk_usage("/dev/shm").total
    assert this_machine.disk_total == psutil.disk_usage(str(Path(__file__).parent)).total
    assert this_machine.nofile == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]


def test_a_port_that_is_taken_names_its_process():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        taken = inspect_machine(ports={"http": port}).ports_taken
    assert list(taken) == [f"{port} (http)"] and f"process {os.getpid()} " in taken[f"{port} (http)"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 << 30),
        ("80G", 80 << 30),
        ("1.5 gib", 3 << 29),
        ("24GB", 24 * 10**9),
        ("1024", 1024),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text, size):
    assert parse_bytes(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["", "80X", "-1G", "0", "GiB", "5 i", "5iB", "9" * 30])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--gpu-memory is"):
        parse_bytes(text, "--gpu-memory")


def test_sizes_in_words():
    assert [in_words(size) for size in (5, 1536, 3 << 19, 3 << 29, -1)] == [
        "5 B", "1.50 KiB", "1.50 MiB", "1.50 GiB", "unlimited",
    ]  # fmt: skip
