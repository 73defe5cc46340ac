"""The demonstration: the right prompt, a cache that is used and renewed, and one run from end to end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.tools import demo
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.cli import app

ROOT = Path(__file__).parents[2]


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    code = "import sys; from tridecode.tools import demo\n"
    code += "print(demo.packaged_model(), demo.PACKAGE in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, imported = done.stdout.rsplit(maxsplit=1)
    assert imported == "False"
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"


def test_a_model_that_cannot_be_read_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="'someone/absent' is not a file or folder"):
        demo.demo_repository("someone/absent", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cache", ["file/cache", "file"])
def test_a_cache_that_cannot_be_made_is_told_before_the_model_is_read(tmp_path, cache) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: .*file is not a folder"):
        demo.demo_repository("someone/absent", tmp_path / cache)


def test_an_answer_is_not_asked_to_be_longer_than_the_models_positions(tmp_path) -> None:
    checkpoint = save(tiny_llama(max_position_embeddings=32), tmp_path / "tiny")
    repository = build_repo(str(checkpoint), tmp_path / "repo", parity=False)
    tokens = len(tiny_tokenizer(adds_bos=True)("The history").input_ids)
    assert demo.room_after("The history", repository) == 32 - tokens > 1
    assert demo.room_after("The history " * 50, repository) == 1  # the server says how long is too long


@pytest.mark.server
def test_the_demonstration_streams_an_answer_and_leaves_nothing_running(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    arguments = ["demo", "--model", str(checkpoint), "--prompt", "The history of", "--max-tokens", "5"]
    first, second = CliRunner().invoke(app, arguments), CliRunner().invoke(app, arguments)
    for done in (first, second):
        assert done.exit_code == 0, done.output
        assert re.search(r"first token \d+ ms.*; 5 tokens; ended by its length", done.stderr)
        assert re.search(r"to serve it: .* serve demo/tiny-", done.stderr)
    assert "(exists)" in second.stderr and "(exists)" not in first.stderr
    assert len(second.stdout.strip()) > 0 and first.stdout.endswith(second.stdout)
    log = (tmp_path / "demo" / "serve.log").read_text()
    assert "stopped" in log.splitlines()[-1]


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = set(re.findall(r"^  make (\S+) ", done.stdout, re.MULTILINE))
    assert set(phony.group(1).split()) == listed


def test_make_says_which_python_it_wants(tmp_path) -> None:
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", "PYTHON="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no Python 3.10, 3.11 or 3.12" in done.stdout
