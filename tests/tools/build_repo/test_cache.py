"""The cache of converted repositories: found by content, made again after a change, bounded, shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.tools.build_repo import cache as cache_module
from tridecode.tools.build_repo.cache import Conversion, RepositoryCache, size_limit
from tridecode.tools.build_repo.checkpoint_digest import checkpoint_digest


class Builder:
    """Writes repositories of `size` bytes and counts them."""

    def __init__(self, size: int = 100, seconds: float = 0.0):
        self.size, self.seconds, self.built = size, seconds, []

    def __call__(self, checkpoint: str, output: Path, conversion: Conversion) -> None:
        time.sleep(self.seconds)
        self.built.append((Path(checkpoint).name, conversion))
        output.mkdir()
        (output / "weights").write_bytes(bytes(self.size))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "My Model 1.5B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_checkpoint_is_converted_once_and_again_when_its_content_changes(tmp_path, checkpoint) -> None:
    cache, build = RepositoryCache(tmp_path / "cache", 10**9), Builder()
    first, existed = cache.find_or_build(checkpoint, Conversion(), build)
    assert not existed and first.name.startswith("my-model-1.5b-")
    assert cache.find_or_build(checkpoint, Conversion(), build) == (first, True) and len(build.built) == 1
    os.utime(checkpoint / "config.json", (1, 1))  # another time, the same content
    assert cache.find_or_build(checkpoint, Conversion(), build) == (first, True)
    (checkpoint / "config.json").write_text('{"hidden_size": 8}')
    again = RepositoryCache(tmp_path / "cache", 10**9)
    second, existed = again.find_or_build(checkpoint, Conversion(), build)
    assert not existed and second != first and len(build.built) == 2


def test_a_copy_of_a_checkpoint_finds_its_repository(tmp_path, checkpoint) -> None:
    cache, build = RepositoryCache(tmp_path / "cache", 10**9), Builder()
    first, _ = cache.find_or_build(checkpoint, Conversion(), build)
    moved = tmp_path / "elsewhere" / checkpoint.name
    moved.parent.mkdir()
    checkpoint.rename(moved)
    assert cache.find_or_build(moved, Conversion(), build) == (first, True)


def test_options_of_the_conversion_and_the_converter_are_part_of_the_name(
    tmp_path, checkpoint, monkeypatch
) -> None:
    cache, build = RepositoryCache(tmp_path / "cache", 10**9), Builder()
    plain, _ = cache.find_or_build(checkpoint, Conversion(), build)
    rounded, _ = cache.find_or_build(checkpoint, Conversion(quantize="int8"), build)
    split, _ = cache.find_or_build(checkpoint, Conversion(tp=2), build)
    assert len({plain, rounded, split}) == 3
    monkeypatch.setattr(cache_module, "converter_digest", lambda: "another")
    assert cache.find_or_build(checkpoint, Conversion(), build)[1] is False


def test_an_outdated_entry_is_removed_unless_a_process_uses_it(tmp_path, checkpoint) -> None:
    folder, build = tmp_path / "cache", Builder()
    users = RepositoryCache(folder, 10**9)
    first, _ = users.find_or_build(checkpoint, Conversion(), build)
    (checkpoint / "config.json").write_text("[1]")
    second, _ = RepositoryCache(folder, 10**9).find_or_build(checkpoint, Conversion(), build)
    assert first.is_dir()  # `users` has it
    for descriptor in users._held:
        os.close(descriptor)
    (checkpoint / "config.json").write_text("[2]")
    third, _ = RepositoryCache(folder, 10**9).find_or_build(checkpoint, Conversion(), build)
    assert not first.exists() and second.is_dir() and third.is_dir()


def test_the_entries_used_longest_ago_are_evicted(tmp_path) -> None:
    folder, build, made = tmp_path / "cache", Builder(1000), []
    for number in range(4):
        source = tmp_path / f"model{number}.gguf"
        source.write_bytes(bytes([number]))
        code = (
            "import sys; from pathlib import Path; from tests.tools.build_repo.test_cache import Builder\n"
            "from tridecode.tools.build_repo.cache import Conversion, RepositoryCache\n"
            "c = RepositoryCache(Path(sys.argv[1]), 3500)\n"
            "print(c.find_or_build(Path(sys.argv[2]), Conversion(), Builder(1000))[0])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(source)], capture_output=True, text=True, check=True
        )
        path = Path(done.stdout.strip())
        if path.is_dir():
            os.utime(path / cache_module.RECORD, (number, number))
        made.append(path)
    assert [path.is_dir() for path in made] == [False, True, True, True]
    cache = RepositoryCache(folder, 3500)
    assert [entry.path for entry in cache.entries()] == made[:0:-1]
    assert {entry.bytes for entry in cache.entries()} == {1000}
    large = tmp_path / "large.gguf"
    large.write_bytes(b"large")
    kept, _ = cache.find_or_build(large, Conversion(), Builder(10_000))  # larger than the limit
    assert kept.is_dir() and build.built == [] and len(cache.entries()) == 1


def test_two_processes_convert_a_checkpoint_once(tmp_path, checkpoint) -> None:
    build = Builder(seconds=0.3)
    found: list[tuple[Path, bool]] = []

    def run() -> None:
        found.append(
            RepositoryCache(tmp_path / "cache", 10**9).find_or_build(checkpoint, Conversion(), build)
        )

    threads = [threading.Thread(daemon=True, target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(build.built) == 1 and len({path for path, _ in found}) == 1
    assert sorted(existed for _, existed in found) == [False, True]


def test_a_conversion_that_fails_leaves_no_entry(tmp_path, checkpoint) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("no such family")

    cache = RepositoryCache(tmp_path / "cache", 10**9)
    with pytest.raises(CheckpointError, match="no such family"):
        cache.find_or_build(checkpoint, Conversion(), fail)
    assert cache.entries() == []


def test_what_a_killed_process_left_is_removed_and_strangers_files_are_not(tmp_path, checkpoint) -> None:
    folder = tmp_path / "cache"
    half, strange = folder / ".m-0123456789abcdef.removed-1", folder / "notes-of-mine"
    for path in (half, strange):
        path.mkdir(parents=True)
    cache = RepositoryCache(folder, 0)
    path, _ = cache.find_or_build(checkpoint, Conversion(), Builder())
    assert not half.exists() and strange.is_dir() and path.is_dir()
    (path / cache_module.RECORD).write_text("half a rec")
    (entry,) = cache.entries()
    assert (entry.path, entry.source) == (path, "") and entry.bytes >= 100


def test_a_spoilt_file_of_digests_is_made_again(tmp_path, checkpoint) -> None:
    records = tmp_path / "digests.json"
    wanted = checkpoint_digest(checkpoint, records)
    for text in ("", "[1]", '{"a": 1}', json.dumps({name: "x" for name in json.loads(records.read_text())})):
        records.write_text(text)
        assert checkpoint_digest(checkpoint, records) == wanted
    (checkpoint / "config.json").rename(checkpoint / "config2.json")
    assert checkpoint_digest(checkpoint, records) != wanted


def test_a_folder_that_cannot_be_made_is_named(tmp_path, checkpoint) -> None:
    (tmp_path / "file").touch()
    cache = RepositoryCache(tmp_path / "file" / "cache", 10**9)
    with pytest.raises(ConfigError, match="file is not a folder"):
        cache.check()
    with pytest.raises(ConfigError, match="the cache .*file/cache cannot be made"):
        cache.find_or_build(checkpoint, Conversion(), Builder())


@pytest.mark.parametrize(
    ("text", "wanted"), [("", 200_000_000_000), ("50G", 50 << 30), ("50GB", 50 * 10**9), ("1000", 1000)]
)
def test_the_limit_is_read_from_the_environment(monkeypatch, text, wanted) -> None:
    monkeypatch.setenv("TRIDECODE_CACHE_BYTES", text)
    assert size_limit() == wanted


@pytest.mark.parametrize("text", ["-1", "many", "1e9", "0", "9" * 99])
def test_a_wrong_limit_is_refused(monkeypatch, text) -> None:
    monkeypatch.setenv("TRIDECODE_CACHE_BYTES", text)
    with pytest.raises(ConfigError, match="TRIDECODE_CACHE_BYTES is .*; wanted"):
        size_limit()


def test_an_entry_in_use_by_another_process_is_not_removed(tmp_path, checkpoint) -> None:
    folder = tmp_path / "cache"
    code = (
        "import sys, time; from pathlib import Path; from tests.tools.build_repo.test_cache import Builder\n"
        "from tridecode.tools.build_repo.cache import Conversion, RepositoryCache\n"
        "c = RepositoryCache(Path(sys.argv[1]), 10**9)\n"
        "print(c.find_or_build(Path(sys.argv[2]), Conversion(), Builder())[0], flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(folder), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            path = Path(process.stdout.readline().strip())
            cache = RepositoryCache(folder, 10**9)
            assert not cache.remove(path) and path.is_dir()
        finally:
            process.kill()
            process.wait()
    wait_until(lambda: cache.remove(path), 60, "the lock of a killed process to end")
    assert not path.exists()
