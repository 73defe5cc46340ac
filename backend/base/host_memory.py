"""Host memory available to this process: the kernel's figure, within the limits of its cgroups. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroups v1 reports 2**63, rounded to pages, for no limit


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or an out-of-memory kill. root: parent of /proc
    and /sys, for tests. In a cgroup (v1 or v2): its limit minus its usage, without clean file pages, which
    can be reclaimed.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(min([free, *_cgroup_rooms(root)]), 0)


def _cgroup_rooms(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root):
        for limit_file, use_file, clean in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, use = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and use is not None and limit < _UNLIMITED:
                yield limit - use + _statistic(folder / "memory.stat", clean)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Return this process's memory cgroups, from its own up to the visible root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = base / path.lstrip("/")
        yield from (
            parent for parent in (folder, *folder.parents) if parent == base or base in parent.parents
        )


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
