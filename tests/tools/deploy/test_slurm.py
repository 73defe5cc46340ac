"""The batch scripts: shellcheck, and what they hand to srun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.deploy.files import BATCH_SCRIPTS, parsed

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
#: options of sbatch 24.05 that the scripts may use, with the values they take
DIRECTIVES = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]",
    "time": r"\d+-\d\d:\d\d:\d\d",
    "signal": r"TERM@\d+",
}
#: options of srun, of pyxis for containers, and whether they take a value
OPTIONS = {
    "ntasks": True,
    "ntasks-per-node": True,
    "nodes": True,
    "mpi": True,
    "kill-on-bad-exit": True,
    "container-image": True,
    "container-mounts": True,
    "no-container-mount-home": False,
}
SRUN = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in ("NVIDIA_VISIBLE_DEVICES",)}}]))
"""


def shellcheck(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHELLCHECK, "--color=never", path], capture_output=True, text=True, timeout=60)


def run_script(path: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script with a srun that prints its arguments."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    environment = {"PATH": f"{srun.parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(["bash", path], env=environment, capture_output=True, text=True, timeout=60)


def options_and_command(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """srun's own options, and the command that follows them."""
    options = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            return options, words[index:]
        name, equals, value = word[2:].partition("=")
        assert OPTIONS[name] == bool(equals), word
        options[name] = value
    raise AssertionError(f"no command: {words}")


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)
def test_shellcheck_finds_nothing(path):
    done = shellcheck(path)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_would_find_an_open_word(tmp_path):
    changed = tmp_path / "a.sbatch"
    changed.write_text("#!/bin/bash\nsrun --container-image=$IMAGE true\n")
    done = shellcheck(changed)
    assert done.returncode == 1 and "SC2086" in done.stdout


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)
def test_its_directives_are_options_of_sbatch_before_the_first_command(path):
    head = path.read_text().partition("set -euo pipefail")[0]
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", head, re.MULTILINE))
    assert len(directives) == path.read_text().count("#SBATCH") and "time" in directives
    for name, value in directives.items():
        assert re.fullmatch(DIRECTIVES[name], value), name


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)
def test_it_starts_our_command_in_the_container(path, tmp_path):
    models, image = str(tmp_path / "my models"), str(tmp_path / "an image.sqsh")
    done = run_script(path, tmp_path, MODELS=models, IMAGE=image, PORT="9100")
    assert done.returncode == 0, done.stderr
    words, environment = json.loads(done.stdout)
    options, command = options_and_command(words)
    assert options["container-image"] == image
    assert options["container-mounts"].split(",")[0] == f"{models}:/models:ro"
    assert environment == {"NVIDIA_VISIBLE_DEVICES": "all"}
    serve = parsed(command)
    assert [serve[f"{name}_port"] for name in ("http", "grpc", "metrics")] == [9100, 9101, 9102]
    assert str(serve["repository"]) == "/models" and serve["address"] == "0.0.0.0"
    [signal_s] = re.findall(r"--signal=TERM@(\d+)", path.read_text())
    assert int(signal_s) > serve["drain_s"] + 10, "Slurm kills what has not ended"


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["MODELS", "IMAGE"])
def test_it_says_which_variable_is_missing(path, name, tmp_path):
    given = {key: "x" for key in ("MODELS", "IMAGE") if key != name}
    done = run_script(path, tmp_path, **given)
    assert done.returncode != 0 and f"{name}: wanted {name}=<" in done.stderr
