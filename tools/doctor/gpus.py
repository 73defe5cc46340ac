"""The GPUs of this machine, as reported by nvidia-smi and torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

import torch

_SMI_S = 30.0
_FIELDS = (
    *("index", "name", "compute_cap", "memory.total", "memory.used"),
    *("driver_version", "mig.mode.current"),
)
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU. capability: e.g. 90 for 9.0. memory, used: bytes. driver: its version. mig: "Enabled",
    "Disabled" or "[N/A]".
    """

    index: int
    name: str
    capability: int
    memory: int
    used: int = 0
    driver: str = ""
    mig: str = "Disabled"


@dataclass(frozen=True)
class Cuda:
    """CUDA on this machine. smi: nvidia-smi's GPUs; smi_error: why it reported none. driver_cuda: newest CUDA
    that the driver supports, e.g. "13.0". torch_cuda: the CUDA that torch was built for, None for a CPU
    build. visible: GPUs that torch can use. nccl: its version, None without.
    """

    smi: tuple[Gpu, ...] = ()
    smi_error: str = ""
    driver_cuda: str | None = None
    torch_cuda: str | None = None
    visible: tuple[Gpu, ...] = ()
    nccl: str | None = None


def inspect_cuda() -> Cuda:
    smi, error, driver_cuda = _ask_smi()
    visible = tuple(_visible(index, smi) for index in range(torch.cuda.device_count()))
    nccl = None
    if torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Cuda(smi, error, driver_cuda, torch.version.cuda, visible, nccl)


def _visible(index: int, smi: tuple[Gpu, ...]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    same = next((gpu for gpu in smi if gpu.name == properties.name), None)
    return Gpu(
        index,
        properties.name,
        10 * properties.major + properties.minor,
        total,
        total - free,
        same.driver if same else "",
        same.mig if same else "[N/A]",
    )


def _ask_smi() -> tuple[tuple[Gpu, ...], str, str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "nvidia-smi is not installed", None
    try:
        query = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        rows = _run(query)
        heading = re.search(r"CUDA Version:\s*([\d.]+)", _run([program]))
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)
        return (), f"nvidia-smi failed: {' '.join(str(text).split())[:300]}", None
    gpus = parse_smi(rows)
    return gpus, "" if gpus else "nvidia-smi lists no GPU", heading.group(1) if heading else None


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout


def parse_smi(rows: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of a query of _FIELDS; malformed lines are skipped."""
    found = []
    for row in rows.splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(_FIELDS):
            continue
        index, name, capability, total, used, driver, mig = cells
        try:
            number = int(capability.replace(".", ""))
            found.append(Gpu(int(index), name, number, int(total) * _MIB, int(used) * _MIB, driver, mig))
        except ValueError:
            continue
    return tuple(found)
