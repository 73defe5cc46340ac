"""An interrupted build-repo continues where it stopped, with the same result as an uninterrupted run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.checkpoints import save, tiny_gpt2
from tridecode.backend.base.errors import ConfigError
from tridecode.converters import writer
from tridecode.tools.build_repo import proof, staging
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo

WEIGHTS = Path("fastertransformer") / "1" / "1-gpu"


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(staging, "_WORTH_KEEPING", 1)
    return save(tiny_gpt2(), tmp_path / "hf")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.bin")}


def breaking_after(monkeypatch, count: int, error: BaseException) -> None:
    """The writer raises instead of writing its file number `count`."""
    write, written = writer._write_file, []

    def break_off(*arguments):
        if len(written) == count:
            raise error
        written.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(writer, "_write_file", break_off)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_conversion_that_was_broken_off_goes_on(source, tmp_path, monkeypatch, capsys, error):
    with monkeypatch.context() as patch:
        breaking_after(patch, 8, error)
        with pytest.raises((KeyboardInterrupt, ConfigError)) as caught:
            build_repo(source, tmp_path / "repo", parity=False)
    text = str(caught.value) + capsys.readouterr().err
    assert f"run the same command again to go on, or remove {tmp_path / '.repo.building'}" in text
    assert not (tmp_path / "repo").exists()
    (tmp_path / ".repo.building" / "stray").mkdir()
    before = inodes(tmp_path / ".repo.building" / WEIGHTS)
    assert len(before) >= 4
    build_repo(source, tmp_path / "repo", parity=False)
    after = inodes(tmp_path / "repo" / WEIGHTS)
    assert {name: after[name] for name in before} == before  # the same files, not written again
    build_repo(source, tmp_path / "whole", parity=False)
    assert files_of(tmp_path / "repo") == files_of(tmp_path / "whole")
    assert check_repo(tmp_path / "repo", checksums=True) == check_repo(tmp_path / "whole")


def test_a_break_after_the_weights_keeps_them(source, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(proof, "check_parity", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_repo(source, tmp_path / "repo")
    before = inodes(tmp_path / ".repo.building" / WEIGHTS)
    build_repo(source, tmp_path / "repo")
    assert inodes(tmp_path / "repo" / WEIGHTS) == before
    assert not (tmp_path / ".repo.building").exists()
    assert not (tmp_path / "repo" / WEIGHTS / "conversion.journal").exists()
    assert check_repo(tmp_path / "repo", checksums=True) == []


def test_another_model_or_degree_starts_anew(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        breaking_after(patch, 8, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build_repo(source, tmp_path / "repo", parity=False)
    other = save(tiny_gpt2(seed=9), tmp_path / "other")
    build_repo(
        other, tmp_path / "repo", parity=False, tensor_para_size=3, engine_settings={"data_type": "fp32"}
    )
    build_repo(
        other, tmp_path / "whole", parity=False, tensor_para_size=3, engine_settings={"data_type": "fp32"}
    )
    assert files_of(tmp_path / "repo") == files_of(tmp_path / "whole")


def test_two_builds_of_one_output_do_not_mix(source, tmp_path):
    (tmp_path / ".repo.building").mkdir()
    held = os.open(tmp_path / ".repo.building", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being built by another process"):
            build_repo(source, tmp_path / "repo", parity=False)
    finally:
        os.close(held)
    build_repo(source, tmp_path / "repo", parity=False)


def test_a_small_conversion_that_was_broken_off_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_WORTH_KEEPING", 1 << 30)
    breaking_after(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_repo(source, tmp_path / "repo", parity=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
