"""`tridecode cache list` and `tridecode cache rm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tridecode.tools.build_repo.cache import Conversion, RepositoryCache
from tridecode.tools.cli import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("TRIDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(folder: Path, name: str, conversion: Conversion = Conversion()) -> tuple[Path, RepositoryCache]:
    source = folder.parent / name
    source.write_text(name)
    cache = RepositoryCache(folder)

    def build(checkpoint: str, output: Path, conversion: Conversion) -> None:
        output.mkdir()
        (output / "weights").write_bytes(bytes(1234))

    return cache.find_or_build(source, conversion, build)[0], cache


def run(*words: str):
    return CliRunner().invoke(app, ["cache", *words])


def test_the_list_shows_sizes_sources_and_options(folder) -> None:
    assert run("list").stdout.strip() == f"{folder}: 0 repositories, 0 bytes"
    path, _ = add(folder, "tiny.gguf", Conversion(quantize="int8"))
    lines = run("list").stdout.splitlines()
    assert lines[0].startswith(path.name) and "1,234 bytes" in lines[0]
    assert lines[0].endswith(f"{folder.parent / 'tiny.gguf'} --quantize int8")
    assert lines[1] == f"{folder}: 1 repositories, 1,234 bytes"


def test_a_repository_in_use_stays_and_others_go(folder) -> None:
    used, cache = add(folder, "used.gguf")
    free, other = add(folder, "free.gguf")
    assert run("rm", "--all").exit_code == 0 and used.is_dir() and free.is_dir()  # this process has both
    for descriptor in other._held:
        os.close(descriptor)
    done = run("rm", used.name, free.name)
    assert done.exit_code == 1 and used.is_dir() and not free.exists()
    assert "removed 1,234 bytes" in done.stdout and f"{used.name} is in use; it stays" in done.output
    assert cache.entries()[0].path == used


@pytest.mark.parametrize("words", [(), ("name", "--all")])
def test_names_or_all_are_wanted(folder, words) -> None:
    done = run("rm", *words)
    assert done.exit_code == 2 and "wanted the names of repositories, or --all" in done.output


def test_an_unknown_name_is_refused_before_anything_is_removed(folder) -> None:
    path, cache = add(folder, "one.gguf")
    done = run("rm", path.name, "absent")
    assert done.exit_code == 2 and "has no repository 'absent'" in done.output and path.is_dir()
