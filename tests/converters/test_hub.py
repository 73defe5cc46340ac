"""Downloads from a server that speaks the hub's protocol, by the hub's own client in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub, commit_of, fake_hub

#: the client hands on what it has received in pieces of 10 MiB
PIECE = 10 << 20
PROGRAM = "import sys; from tridecode.converters import model_source as m; print(m.find_model(sys.argv[1]))"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def source(tmp_path: Path, hub: FakeHub) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    hub.repositories["org/tiny"] = {"main": folder}
    return folder


def find(hub: FakeHub, home: Path, model: str = "org/tiny", **more: str) -> tuple[Path | None, str]:
    """Return the path that was found, and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env={**os.environ, "NO_PROXY": "127.0.0.1", **hub.environment(home / "hub"), **more},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home,
    )
    return Path(done.stdout.strip()) if done.returncode == 0 else None, done.stderr


def test_safetensors_are_downloaded_without_pickles_exports_and_other_files(hub, source, tmp_path) -> None:
    names = ("pytorch_model.bin", "training_args.bin", "consolidated.safetensors", "onnx/model.safetensors")
    for name in (*names, "handler.py", "chat_template.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"other")
    found, text = find(hub, tmp_path)
    assert found is not None, text
    assert found.name == commit_of(source)
    wanted = {"config.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in found.iterdir()} == wanted
    assert all((found / name).read_bytes() == (source / name).read_bytes() for name in wanted)


def test_a_model_without_safetensors_is_downloaded_as_pytorch_saved_it(hub, source, tmp_path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    found, text = find(hub, tmp_path)
    assert found is not None and (found / "pytorch_model.bin").exists(), text


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, source, tmp_path) -> None:
    old = shutil.copytree(source, tmp_path / "old")
    (old / "model.safetensors").write_bytes(b"older weights")
    hub.repositories["org/tiny"]["v1.0"] = old
    for revision in ("v1.0", commit_of(old)):
        found, text = find(hub, tmp_path, f"org/tiny@{revision}")
        assert found is not None and (found / "model.safetensors").read_bytes() == b"older weights", text
    found, _ = find(hub, tmp_path)
    assert found is not None and (found / "model.safetensors").read_bytes() == b"weights"
    absent, text = find(hub, tmp_path, "org/tiny@v9")
    assert absent is None and "'org/tiny@v9' is not a file or folder" in text and "Revision Not Found" in text


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub, source, tmp_path) -> None:
    data = os.urandom(2 * PIECE + 5_000_000)
    (source / "model.safetensors").write_bytes(data)
    hub.cuts["model.safetensors"] = PIECE + 1_000_000
    found, text = find(hub, tmp_path)
    assert found is not None and (found / "model.safetensors").read_bytes() == data, text
    assert hub.fetched("model.safetensors") == ["", f"bytes={PIECE}-", f"bytes={2 * PIECE}-"]


def test_files_that_are_complete_are_not_downloaded_again_after_a_failure(hub, source, tmp_path) -> None:
    (source / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        (source / name).write_bytes(name.encode() * 10)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.missing.add("b.safetensors")
    absent, text = find(hub, tmp_path)
    assert absent is None and "the hub lists a file of org/tiny that it does not have" in text
    assert "b.safetensors" in text.splitlines()[-1]
    hub.missing.clear()
    found, text = find(hub, tmp_path)
    assert found is not None and (found / "b.safetensors").exists(), text
    assert len(hub.fetched("a.safetensors")) == 1


def test_a_missing_shard_is_named_before_any_weights_are_downloaded(hub, source, tmp_path) -> None:
    (source / "model.safetensors").unlink()
    (source / "a.safetensors").write_bytes(b"a")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    absent, text = find(hub, tmp_path)
    assert absent is None
    assert "org/tiny has no file 'b.safetensors', which model.safetensors.index.json lists" in text
    assert hub.fetched("a.safetensors") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("model.safetensors", "org/tiny has no weights"), ("config.json", "org/tiny has no config.json")],
)
def test_a_repository_that_is_no_checkpoint_is_refused(hub, source, tmp_path, name, text) -> None:
    (source / name).unlink()
    absent, shown = find(hub, tmp_path)
    assert absent is None and text in shown


def test_a_repository_of_gguf_files_is_refused_with_the_way_to_use_one(hub, source, tmp_path) -> None:
    (source / "config.json").unlink()
    (source / "tiny.Q8_0.gguf").write_bytes(b"GGUF")
    absent, text = find(hub, tmp_path)
    assert absent is None and "download 'tiny.Q8_0.gguf' and name that file" in text


def test_without_the_hub_the_complete_copy_is_used_and_said_once(hub, source, tmp_path) -> None:
    first, _ = find(hub, tmp_path)
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing listens
    began = time.monotonic()
    found, text = find(hub, tmp_path, **away)
    assert found == first and time.monotonic() - began < 60
    assert text.count("the copy in the hub's cache is used") == 1 and "Traceback" not in text
    hub.repositories["org/other"] = {"main": source}
    absent, text = find(hub, tmp_path, "org/other", **away)
    assert absent is None
    assert [line.count("could not be reached") for line in text.splitlines()].count(1) == 1, text


def test_an_incomplete_copy_is_not_used_without_the_hub(hub, source, tmp_path) -> None:
    hub.missing.add("model.safetensors")
    assert find(hub, tmp_path)[0] is None
    absent, text = find(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert absent is None and "org/tiny has no weights" in text
