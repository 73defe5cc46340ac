"""The memory available to a process, read from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tridecode.backend.base.host_memory import available_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 7 kB\nMemAvailable: {32 << 20} kB\n"


def machine(root: Path, **files: str) -> Path:
    """Write the files. files: maps a path, with __ for /, to its text."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, use: int, clean: int) -> dict[str, str]:
    """Return the files of a cgroup, version 2."""
    return {
        f"{folder}__memory.max": limit,
        f"{folder}__memory.current": str(use),
        f"{folder}__memory.stat": f"anon 5\ninactive_file {clean}\n",
    }


def test_without_a_cgroup_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 32 * GIB


def test_the_limit_of_a_cgroup_counts_less_what_it_holds(tmp_path: Path) -> None:
    files = group("sys__fs__cgroup__pod", str(8 * GIB), 5 * GIB, 2 * GIB)
    assert available_memory(machine(tmp_path, proc__self__cgroup="0::/pod\n", **files)) == 5 * GIB


def test_the_tightest_group_above_decides(tmp_path: Path) -> None:
    files = group("sys__fs__cgroup__a__b", "max", GIB, 0) | group("sys__fs__cgroup__a", str(3 * GIB), GIB, 0)
    assert available_memory(machine(tmp_path, proc__self__cgroup="0::/a/b\n", **files)) == 2 * GIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = group("sys__fs__cgroup", str(4 * GIB), 3 * GIB, GIB)
    assert available_memory(machine(tmp_path, proc__self__cgroup="0::/\n", **files)) == 2 * GIB


@pytest.mark.parametrize("limit, wanted", [(6 * GIB, 5 * GIB), (0x7FFFFFFFFFFFF000, 32 * GIB)])
def test_version_1(tmp_path: Path, limit: int, wanted: int) -> None:
    held = machine(
        tmp_path,
        proc__self__cgroup="9:cpu:/x\n4:memory:/x\n0::/\n",
    )
    folder = held / "sys/fs/cgroup/memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    (folder / "memory.usage_in_bytes").write_text(str(2 * GIB))
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert available_memory(held) == wanted


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = group("sys__fs__cgroup", str(GIB), 2 * GIB, 0)
    assert available_memory(machine(tmp_path, proc__self__cgroup="0::/\n", **files)) == 0


def test_this_machine_has_some() -> None:
    assert 1 << 20 < available_memory() <= psutil.virtual_memory().available * 1.2
