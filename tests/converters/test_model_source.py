"""What `--model` names: paths are refused at once, ids of the hub within seconds."""

from __future__ import annotations

import socket
import time

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters import hub
from tridecode.converters.model_source import find_model, is_hub_id


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.parametrize("model", ["gpt2", "bigscience/bloom-560m", "Qwen/Qwen2.5-0.5B", "a_b/c.d-1"])
def test_ids_of_the_hub(model):
    validate_repo_id(model)  # the hub's own rule
    assert is_hub_id(model) and is_hub_id(f"{model}@main") and is_hub_id(f"{model}@refs/pr/1")


@pytest.mark.parametrize(
    "model",
    [
        "/a/b",
        "./b",
        "../b",
        "~/b",
        "a/b/c",
        "a/",
        "m.gguf",
        "a/m.gguf",
        "a/m.nemo",
        "a--b",
        "",
        "a\\b",
        "a b",
        "a/b@",
        "a/b@../c",
        "a/b@/c",
        "a/b@c//d",
        "a/b@c@d",
        "@main",
    ],
)
def test_paths_are_no_ids_of_the_hub(model):
    assert not is_hub_id(model)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./ckpt/smol", r"ckpt/smol: no such file or folder \(ckpt does not exist\)"),
        ("./models/smol", r"models/smol: no such file or folder \(did you mean models/smol2\?\)"),
        ("models/smol.gguf", r"models/smol.gguf: no such file \(did you mean models/smoll.gguf\?\)"),
        (
            "~/no-such-folder/smol",
            r"/no-such-folder/smol: no such file or folder \(.*/no-such-folder does not",
        ),
    ],
)
def test_a_path_that_does_not_exist_is_refused_without_the_hub(folder, monkeypatch, capfd, model, told):
    def ask(repository, revision):
        raise AssertionError(f"asked for {repository}")

    monkeypatch.setattr(hub, "_ask", ask)
    (folder / "models").mkdir()
    (folder / "models" / "smol2").mkdir()
    (folder / "models" / "smoll.gguf").touch()
    with pytest.raises(CheckpointError, match=told):
        find_model(model)
    assert capfd.readouterr().err == ""


def test_a_path_of_the_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "smol").mkdir()
    assert find_model("~/smol") == folder / "smol"


def test_a_hub_that_never_answers_is_given_up_and_the_reader_is_told_at_once(folder, monkeypatch, capfd):
    """A server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "ANSWER_S", 1.0)
        started = time.monotonic()
        with pytest.raises(CheckpointError, match="could not be reached.*no answer within 1 s|timed out"):
            find_model("ckpt/smol")
        assert time.monotonic() - started < 4
    assert capfd.readouterr().err == "ckpt/smol: no such folder; asking the hub…\n"


def test_a_refusal_of_the_hub_is_told_with_the_name_that_is_near(folder, monkeypatch, capfd):
    def ask(repository, revision):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(hub, "_ask", ask)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (folder / "ckpt" / "smol2").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        find_model("ckpt/smol")
    assert str(caught.value) == (
        "'ckpt/smol' is not a file or folder (did you mean ckpt/smol2?), and the hub could not be reached or "
        "does not have it: no route to the hub"
    )
    assert "no such folder (did you mean ckpt/smol2?); asking the hub" in capfd.readouterr().err


def test_offline_nobody_is_asked(folder, monkeypatch, capfd):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        find_model("ckpt/smol")
    assert capfd.readouterr().err == ""
