"""Findings about a machine, computed only from its facts: every known trap is a function of a Machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tridecode.kernels.build import ARCHITECTURES
from tridecode.tools.byte_sizes import in_words
from tridecode.tools.checks.findings import Finding
from tridecode.tools.doctor.gpus import Cuda
from tridecode.tools.doctor.machine import Machine

_SHM_WANTED = 256 << 20  # each model's stub takes 1 MB at its start, and grows with what requests carry
_NOFILE_WANTED = 4096
_DISK_WANTED = 1 << 30
_MEMLOCK_WANTED = 1 << 30  # memory that NCCL registers with an InfiniBand card
_OLDEST = min(ARCHITECTURES)


def machine_findings(machine: Machine, ranks: int = 1, on_gpu: bool | None = None) -> Iterator[Finding]:
    """Return the findings.

    ranks: processes of the engine. on_gpu: whether it runs on GPUs; None: if there are any.
    """
    gpus = bool(machine.cuda.visible)
    yield from _gpus(machine)
    if gpus if on_gpu is None else on_gpu:
        yield from _kernels(machine)
        yield from _nccl(machine, ranks)
    yield from _limits(machine, ranks)
    yield from _doors(machine)
    for port, holder in machine.ports_taken.items():
        name = re.sub(r".*\((\w+)\)", r"\1", port)
        fix = f"End it, or start with `tridecode serve --{name}-port` and a free one."
        yield _warning(f"port {port}", f"taken by {holder}", "a free port", fix)


def _error(where: str, found: str, wanted: str, fix: str) -> Finding:
    return Finding("error", where, found, wanted, fix)


def _warning(where: str, found: str, wanted: str, fix: str) -> Finding:
    return Finding("warning", where, found, wanted, fix)


def _gpus(machine: Machine) -> Iterator[Finding]:
    cuda = machine.cuda
    if cuda.smi and cuda.torch_cuda is None:
        yield _error(
            "torch", f"{machine.torch}, a CPU build", f"a CUDA build for {len(cuda.smi)} GPUs",
            "Install torch's CUDA build; until then everything runs on the CPU.",
        )  # fmt: skip
    elif cuda.smi and not cuda.visible:
        if _older_driver(cuda):
            found = f"driver {cuda.smi[0].driver} for CUDA {cuda.driver_cuda}; torch for {cuda.torch_cuda}"
            fix = f"Update the driver, or install torch for CUDA {cuda.driver_cuda}."
            yield _error("driver", found, "a driver at least as new as torch's CUDA", fix)
        else:
            fix = "Is CUDA_VISIBLE_DEVICES empty, or the container started without --gpus?"
            yield _error("GPUs", f"{len(cuda.smi)} in nvidia-smi, 0 in torch", "the same", fix)
    elif cuda.visible and _older_driver(cuda):
        found = f"driver for CUDA {cuda.driver_cuda}; torch for {cuda.torch_cuda}"
        fix = "It works by CUDA's forward compatibility only; update the driver."
        yield _warning("driver", found, "a driver at least as new as torch's CUDA", fix)
    for gpu in cuda.visible:
        where = f"GPU {gpu.index} ({gpu.name})"
        if gpu.capability < _OLDEST:
            found = f"compute capability {_dotted(gpu.capability)}"
            yield _error(
                where, found, f"{_dotted(_OLDEST)} or more", "Its architecture has no kernels: device = cpu."
            )
        if gpu.used > gpu.memory // 10:
            found = f"{in_words(gpu.used)} of {in_words(gpu.memory)} in use"
            yield _warning(
                where, found, "a free GPU", "End what uses it (nvidia-smi), or lower memory_fraction."
            )
    if any(gpu.mig == "Enabled" for gpu in cuda.smi) and len(cuda.visible) < 2:
        fix = "A process sees one MIG instance: tensor_para_size and pipeline_para_size must be 1."
        yield _warning("MIG", "enabled", "whole GPUs for several ranks", fix)


def _kernels(machine: Machine) -> Iterator[Finding]:
    kernels = machine.kernels
    build = "python -m tridecode.kernels.build"
    if kernels.error:
        yield _error(kernels.path, kernels.error, "the kernel library", f"Build it: {build} (needs nvcc).")
        return
    built = re.search(r"arch (all|native|\d+)", kernels.info)
    for gpu in machine.cuda.visible:
        if built is None or built.group(1) in ("all", "native") or int(built.group(1)) == gpu.capability:
            continue
        found = f"built for sm_{built.group(1)}; GPU {gpu.index} is sm_{gpu.capability}"
        yield _error(kernels.path, found, "this GPU's architecture", f"{build} --arch {gpu.capability}")


def _nccl(machine: Machine, ranks: int) -> Iterator[Finding]:
    if ranks > 1 and machine.cuda.nccl is None:
        yield _error(
            "torch", "no NCCL", f"NCCL for {ranks} ranks", "Install torch's CUDA build, which has it."
        )
    if ranks > 1 and machine.infiniband and 0 <= machine.memlock < _MEMLOCK_WANTED:
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1)"
        yield _warning("ulimit -l", f"{in_words(machine.memlock)} of locked memory", "unlimited", fix)


def _limits(machine: Machine, ranks: int) -> Iterator[Finding]:
    if machine.shm_total < _SHM_WANTED:
        fix = "docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        found, wanted = in_words(machine.shm_total), f"at least {in_words(_SHM_WANTED)}"
        yield _error("/dev/shm", found, f"{wanted}: Triton passes requests through it", fix)
    elif machine.shm_free < _SHM_WANTED:
        fix = "Remove what fills it."
        yield _error("/dev/shm", f"{in_words(machine.shm_free)} free", in_words(_SHM_WANTED), fix)
    if machine.shm_leftovers:
        found = f"{machine.shm_leftovers} regions triton_python_backend_shm_region_*"
        fix = "If no tritonserver runs here, a killed one left them: remove them."
        yield _warning("/dev/shm", found, "none while no server runs", fix)
    if 0 <= machine.nofile < _NOFILE_WANTED:
        fix = "ulimit -n 65536 (docker: --ulimit nofile=65536): each connection takes one"
        yield _warning("ulimit -n", str(machine.nofile), f"at least {_NOFILE_WANTED}", fix)
    if machine.disk_free is not None and machine.disk_free < _DISK_WANTED:
        fix = "Free some: logs and building again need it."
        yield _warning("disk", f"{in_words(machine.disk_free)} free", in_words(_DISK_WANTED), fix)
    cpus = machine.cpus if machine.cpu_limit is None else min(machine.cpus, machine.cpu_limit)
    if machine.cuda.visible and cpus < ranks + 2:
        fix = "Doors, tritonserver and the engine's scheduler share them: a step waits for a CPU."
        yield _warning("CPUs", f"{cpus:g}", f"at least {ranks + 2} for {ranks} ranks", fix)
    limit = machine.memory_limit
    if limit is not None and machine.memory_available > limit and not machine.cuda.visible:
        found = (
            f"cgroup limit {in_words(limit)} on a machine with {in_words(machine.memory_available)} available"
        )
        fix = "The cache is sized by the machine's memory: set cache_bytes in config.pbtxt."
        yield _warning("memory", found, "a cache within the limit", fix)


def _doors(machine: Machine) -> Iterator[Finding]:
    doors = machine.doors
    if doors.error:
        yield _error(
            "tritonserver", doors.error, "a server whose python stub runs the doors", "Follow the text."
        )
    if doors.pythonpath:
        fix = "Install packages into the doors' python instead."
        yield _warning("PYTHONPATH", "set", "unset: Triton's stub ignores it", fix)


def _older_driver(cuda: Cuda) -> bool:
    """Return whether the driver's CUDA has an older major version than torch's."""
    if cuda.driver_cuda is None or cuda.torch_cuda is None:
        return False
    return int(cuda.driver_cuda.split(".")[0]) < int(cuda.torch_cuda.split(".")[0])


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
