"""`make clients` installs the versions that the clients' page recommends."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.environments import ENVIRONMENTS, FASTERTRANSFORMER, Environment, install

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")


def test_the_page_pins_the_versions_of_fastertransformers_programs() -> None:
    assert all("==" in requirement for requirement in FASTERTRANSFORMER)
    (line,) = [line for line in PAGE.splitlines() if line.startswith("pip install") and "numpy==" in line]
    assert tuple(shlex.split(line)[2:]) == FASTERTRANSFORMER
    assert set(FASTERTRANSFORMER) <= set(ENVIRONMENTS["programs"].requirements)


def test_an_environment_tells_the_versions_beside_its_package(tmp_path, monkeypatch) -> None:
    commands = []

    def run(command: list[str], deadline: float) -> str:
        commands.append(command[1:])
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "bin" / "python").symlink_to(sys.executable)
        return ""

    monkeypatch.setattr(environments, "run_bounded", run)
    monkeypatch.setattr(environments, "_version", lambda python, package: f"1.{len(package)}")
    wanted = Environment("ab", ("ab>0",), beside=("abc", "abcd"), forced=("x==1",))
    monkeypatch.setitem(ENVIRONMENTS, "ab", wanted)
    assert install("ab", tmp_path).version == "1.2 (abc 1.3, abcd 1.4)"
    pip = ["-m", "pip", "install", "--quiet"]
    assert commands[1:] == [[*pip, "ab>0"], [*pip, "--no-deps", "x==1"]]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_requirements_name_the_package_whose_version_is_shown(name) -> None:
    wanted = ENVIRONMENTS[name]
    assert any(part.startswith(wanted.package) for part in wanted.requirements + wanted.forced)
