"""Dockerfile.triton: hadolint, and what the image needs is in its context and installs from it."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.tools.deploy.files import DOCKERFILE, ROOT, health_command, instruction, instructions, parsed
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.kernels import build
from tridecode.tools.deploy.requirements import requirements
from tridecode.tools.serve.options import ServeOptions

HADOLINT = Path(sys.executable).with_name("hadolint")


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, timeout=60)


def is_ignored(path: str, rules: list[str]) -> bool:
    """Docker's rule: the last pattern that matches a path or a folder above it decides."""
    places = [path, *map(str, Path(path).parents)][:-1]
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        names = (pattern, pattern.removeprefix("**/"), pattern.replace("**/", "*/", 1))
        if any(fnmatch.fnmatchcase(place, name) for place in places for name in names):
            ignored = not rule.startswith("!")
    return ignored


def context() -> list[str]:
    """The tracked and new files of this project that `docker build` sends."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    rules = [
        line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")
    ]
    return [path for path in tracked if not is_ignored(path, rules) and (ROOT / path).is_file()]


def test_hadolint_finds_nothing():
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_a_base_without_a_version(tmp_path):
    changed = tmp_path / "Dockerfile"
    changed.write_text("FROM ubuntu\nRUN cd /tmp && pip install torch\n")
    done = lint(changed)
    assert done.returncode == 1 and "DL3006" in done.stdout and "DL3013" in done.stdout


def test_the_bases_have_full_versions_and_the_package_is_compiled_apart():
    arguments = dict(
        rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "IMAGE=" in rest
    )
    assert all(":" in image and not image.endswith(":latest") for image in arguments.values())
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert stages == ["${CUDA_IMAGE} AS package", "${TRITON_IMAGE} AS server"]
    assert "nvcc" in DOCKERFILE.read_text() and "devel" in arguments["CUDA_IMAGE"]


def test_the_image_runs_as_a_number_that_kubernetes_can_check_and_not_as_root():
    user, _, group = instruction("USER").partition(":")
    assert int(user) >= 1000 and int(group) >= 1000


def test_the_image_serves_on_the_ports_that_it_exposes_and_probes():
    entry, command = json.loads(instruction("ENTRYPOINT")), json.loads(instruction("CMD"))
    options = parsed([*entry[entry.index("--") + 1 :], *command])
    exposed = [int(port) for port in instruction("EXPOSE").split()]
    assert exposed == [options[f"{name}_port"] for name in ("http", "grpc", "metrics")]
    assert options["address"] == "0.0.0.0"
    assert f":{options['http_port']}/v2/models/tridecode_health/" in health_command()[-1]
    assert f"--start-period={EngineConfig().start_timeout_s:g}s" in instruction("HEALTHCHECK")


def test_the_servers_python_is_the_one_that_the_environment_names():
    environment = DOCKERFILE.read_text().partition("\nENV ")[2]
    made = [word for _, rest in instructions() for word in rest.split() if word.startswith("/opt/")]
    assert "TRIDECODE_DOOR_PYTHON=/opt/doors/bin/python" in environment and "/opt/doors" in made
    assert "PATH=/opt/engine/bin:${PATH}" in environment and "/opt/engine" in made


def test_an_unknown_extra_is_an_error():
    with pytest.raises(KeyError, match="none"):
        requirements(ROOT / "pyproject.toml", "none")


def test_the_context_has_the_packages_and_little_else():
    files = context()
    assert {"pyproject.toml", "README.md", "LICENSE", "kernels/build.py", "kernels/csrc/api.h"} <= set(files)
    assert not [path for path in files if path.startswith(("tests/", "docs/", "tools/bench/results", "."))]
    assert sum((ROOT / path).stat().st_size for path in files) < 8 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Build the wheel as the image does, from its context with the library in place."""
    folder = tmp_path_factory.mktemp("image")
    for path in context():
        target = folder / "build" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
    library = folder / "build" / "kernels" / "lib" / build.LIBRARY.name
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder / "dist"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, folder / "build"], check=True, timeout=120
    )
    [made] = (folder / "dist").glob("tridecode-*.whl")
    return zipfile.ZipFile(made)


def test_the_wheel_of_the_context_has_every_module_template_and_the_kernels(wheel):
    packed = set(wheel.namelist())
    folders = ("backend/", "converters/", "kernels/", "model_repo_templates/", "tools/")
    wanted = {
        f"tridecode/{path.removeprefix('tools/package/')}"  # its modules are those of tridecode itself
        for path in context()
        if path.startswith(folders) and path.endswith((".py", ".jinja", ".cu", ".cuh", ".h", ".json"))
    }
    assert wanted - packed == set()
    assert f"tridecode/kernels/lib/{build.LIBRARY.name}" in packed


@pytest.mark.parametrize("extra", ["", "engine", "front", "test"])
def test_the_requirements_are_those_that_setuptools_writes_into_the_wheel(wheel, extra):
    [name] = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    written = message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []
    known = [Requirement(line) for line in written]
    wanted = {
        (one.name, tuple(sorted(one.extras)), one.specifier)
        for one in known
        if one.marker is None or one.marker.evaluate({"extra": extra})
    }
    found = [Requirement(line) for line in requirements(ROOT / "pyproject.toml", extra)]
    assert {(one.name, tuple(sorted(one.extras)), one.specifier) for one in found} == wanted


def test_defaults_of_serve_are_loopback_so_the_image_must_say_otherwise():
    assert ServeOptions(Path("models")).address == "127.0.0.1"
