"""Processes by identity, and what a stub's command line tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import wait_until
from tridecode.backend.supervisor import processes, shared_memory


def test_identity_agrees_with_psutil():
    me = processes.identify(os.getpid())
    started = psutil.boot_time() + me.start / os.sysconf("SC_CLK_TCK")
    assert abs(started - psutil.Process().create_time()) < 2
    assert processes.parent(os.getpid()) == os.getppid()
    assert processes.command_line(os.getpid()) == psutil.Process().cmdline()


def test_a_reused_pid_is_another_process():
    me = processes.identify(os.getpid())
    assert processes.alive(me)
    assert not processes.alive(me._replace(start=me.start - 1))


def test_a_name_with_blanks_and_parentheses_does_not_confuse(tmp_path: Path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        wait_until(lambda: processes.command_line(process.pid) == [str(program), "60"], what="exec")
        assert processes.parent(process.pid) == os.getpid()
        assert process.pid in processes.children(os.getpid())
        process.kill()


def test_a_zombie_is_not_alive():
    process = subprocess.Popen(["true"])
    wait_until(lambda: processes.state(process.pid) == "Z")
    assert processes.identify(process.pid) is None
    assert processes.command_line(process.pid) == []
    process.wait()
    assert processes.state(process.pid) == ""


def test_a_child_dies_with_the_parent_that_was_killed():
    code = (
        "import subprocess, time; from tridecode.backend.supervisor.processes import die_with_parent as die\n"
    )
    code += "p = subprocess.Popen(['sleep', '600'], preexec_fn=die); print(p.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = processes.identify(int(parent.stdout.readline()))
        assert child is not None
        parent.kill()
    wait_until(lambda: not processes.alive(child))


def test_a_process_that_is_no_stub_is_none(tmp_path: Path):
    assert shared_memory.stub_of(os.getpid()) is None
    outside = tmp_path / "kept"
    outside.touch()
    shared_memory.unlink(f"../..{outside}")
    shared_memory.unlink("")
    assert outside.exists()
    assert shared_memory.unlink_prefix("") == []
