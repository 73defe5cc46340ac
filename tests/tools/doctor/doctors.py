"""Machines for the tests of `tridecode doctor`."""

from __future__ import annotations

from dataclasses import replace

from tridecode.tools.doctor.gpus import Cuda, Gpu
from tridecode.tools.doctor.machine import Doors, Kernels, Machine

GIB = 1 << 30
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 90, 80 * GIB, 1 * GIB, "580.65.06", "Disabled")
CUDA = Cuda((H100,), "", "13.0", "13.0", (H100,), "2.27.3")
#: nothing is wrong with it
GPU_MACHINE = Machine(
    cuda=CUDA, memory=256 * GIB, memory_available=200 * GIB, cpus=32, shm_total=4 * GIB, shm_free=4 * GIB,
    nofile=65536, disk_free=100 * GIB, disk_total=200 * GIB,
    doors=Doors("python3", "3.12", "1.26.4", "tritonserver"),
    kernels=Kernels("lib.so", "arch all, nvcc 13.0, sources 0123456789ab"),
)  # fmt: skip
CPU_MACHINE = replace(GPU_MACHINE, cuda=Cuda(), kernels=Kernels("lib.so", error="not built"))


def gpu(**changes) -> Cuda:
    other = replace(H100, **changes)
    return replace(CUDA, smi=(other,), visible=(other,))
