"""`make front-pythons`: the OpenAI service's tests with the service on other Pythons and dependencies.

Python 3.10 gets the oldest versions that pyproject.toml admits, 3.12 the newest. Their environments have the
extra `front` and nothing else, so neither torch nor transformers; the tests themselves run here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.clients.environments import run_bounded
from tests.clients.pythons import find_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients" / "front-pythons"
PYTHONS = {"3.10": True, "3.12": False}  # whether it gets the oldest versions
#: tests of the service; tests with a real engine start it with this interpreter and import torch
TESTS = ("completions_and_chats", "other_routes", "tool_calls", "logprobs", "hostile_clients", "lives")
INSTALL_S = 900.0


def oldest(requirements: list[str]) -> list[str]:
    """Constraints for pip: each dependency of the service at its lower bound. requirements: as of a
    distribution's metadata. Raises ValueError for one without a lower bound."""
    found = []
    for requirement in requirements:
        text, _, condition = requirement.partition(";")
        if "extra" in condition and not re.search(r"""extra == ["']front["']""", condition):
            continue
        name, bound = re.match(r"[\w-]+", text), re.search(r">=\s*([\w.]+)", text)
        if name is None or bound is None:
            raise ValueError(f"{requirement} has no lower bound; wanted NAME>=VERSION in pyproject.toml")
        found.append(f"{name[0]}=={bound[1]}")
    return found


def install(version: str, with_oldest: bool) -> tuple[Path, str]:
    """Return the interpreter of a new environment, and why it could not be made; "": it was."""
    folder = FOLDER / f"python{version}"
    python = find_python(version)
    if python is None:
        return folder, f"there is no Python {version} on the PATH, in pyenv or in uv"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    constraints = folder.parent / f"python{version}.txt"
    requirements = importlib.metadata.requires("tridecode") or []
    constraints.write_text("\n".join(oldest(requirements) if with_oldest else []))
    deadline = time.monotonic() + INSTALL_S
    found = folder / "bin" / "python"
    failure = run_bounded([python, "-m", "venv", str(folder)], deadline)
    command = [str(found), "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", f"{ROOT}[front]"]
    return found, failure or run_bounded(command, deadline)


def main() -> int:
    failed = []
    for version, with_oldest in PYTHONS.items():
        versions = "oldest" if with_oldest else "newest"
        found, failure = install(version, with_oldest)
        if not failure:
            files = [f"tests/backend/front/test_{name}.py" for name in TESTS]
            command = [sys.executable, "-m", "pytest", "-q", *files]
            environment = {**os.environ, "TRIDECODE_TEST_FRONT_PYTHON": str(found)}
            ended = subprocess.run(command, cwd=ROOT, env=environment).returncode
            failure = "its tests fail" if ended else ""
        print(f"Python {version}, {versions} dependencies: {failure or 'right'}", flush=True)
        failed += [version] if failure else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
