"""The probes of image and manifests against a real server, and against a port where none listens."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.desk import Desk
from tests.tools.deploy.files import every_container, health_command
from tridecode.tools.serve.ports import free_ports

pytestmark = pytest.mark.server


def run(command: list[str], url: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which(command[0]), f"{command[0]} is not installed"
    words = [word.replace("127.0.0.1:8000", url) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=30)


def commands() -> list[list[str]]:
    """Every probe as a command; an httpGet as the request that kubelet sends."""
    found = [health_command()]
    for _, _, container in every_container():
        for probe in (container[name] for name in container if name.endswith("Probe")):
            if "exec" in probe:
                found.append(probe["exec"]["command"])
            else:
                found.append(
                    ["curl", "-fsS", "-o", "/dev/null", f"http://127.0.0.1:8000{probe['httpGet']['path']}"]
                )
    return [list(words) for words in sorted({tuple(words) for words in found})]


@pytest.mark.parametrize("command", commands(), ids=lambda words: words[-1].partition("8000")[2])
def test_a_probe_holds_for_a_server_that_serves_and_fails_without_one(desk: Desk, command: list[str]) -> None:
    done = run(command, desk.server.http_url)
    assert done.returncode == 0, done.stderr
    assert run(command, f"127.0.0.1:{free_ports(1)[0]}").returncode != 0


def test_a_health_that_the_server_does_not_have_fails_the_probe(desk: Desk) -> None:
    wrong = [word.replace("tridecode_health", "no_health") for word in health_command()]
    assert run(wrong, desk.server.http_url).returncode != 0
