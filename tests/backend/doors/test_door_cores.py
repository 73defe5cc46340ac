"""The threads of a door share a core; others, and processes that a door starts, do not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tridecode.backend.base import cores
from tridecode.backend.doors.answers.door_cores import share_cores

#: runs as a process of its own, since the cores of a thread outlive a test
PROGRAM = """
import os, subprocess, sys, threading
from unittest import mock
from tridecode.backend.base import cores
from tridecode.backend.doors.answers import door_cores

allowed = os.sched_getaffinity(0)
assert len(allowed) >= 2
end = threading.Event()
shared, free = (threading.Thread(target=end.wait, daemon=True) for _ in range(2))
shared.start(), free.start()
with mock.patch.object(door_cores, "shared_memory_region", lambda: "triton_python_backend_shm_region_1"):
    door_cores.share_cores({count}, "text_0_0", (free,))
kept = os.sched_getaffinity(0)
found = [len(os.sched_getaffinity(thread.native_id)) for thread in (shared, free)]
child = "import os; print(len(os.sched_getaffinity(0)))"
later = []

def start():
    inherited = os.sched_getaffinity(0)
    cores.leave()
    later.extend([inherited == kept, int(subprocess.check_output([sys.executable, "-c", child]))])

thread = threading.Thread(target=start)
thread.start()
thread.join()
print(len(allowed), len(kept), *found, *later)
"""

several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


def run(count: str) -> list[str]:
    program = textwrap.dedent(PROGRAM).replace("{count}", count)
    return subprocess.check_output([sys.executable, "-c", program], text=True).split()


@several
def test_threads_share_a_core_and_what_they_start_leaves_it() -> None:
    total, *found = run("1")
    assert found == ["1", "1", total, "True", total]


@several
@pytest.mark.parametrize("count", ["0", "1000"])
def test_all_cores_are_used_where_that_is_asked_or_there_are_no_more(count: str) -> None:
    total, *found = run(count)
    assert found == [total, total, total, "True", total]


def test_a_process_that_is_no_stub_keeps_its_cores() -> None:
    before = os.sched_getaffinity(0)
    share_cores(1, "text_0_0")
    assert os.sched_getaffinity(0) == before


def test_instances_and_doors_get_cores_of_their_own() -> None:
    allowed = {0, 2, 3, 5, 8, 9, 11, 12}
    first, second = (cores.choose(2, f"text_0_{number}", allowed) for number in range(2))
    assert len(first) == len(second) == 2 and not first & second and first | second <= allowed
    assert cores.choose(20, "text_0_0", allowed) == allowed
    chosen = [cores.choose(1, f"model{number}_0_0", range(64)) for number in range(8)]
    assert len(set(map(frozenset, chosen))) >= 6
