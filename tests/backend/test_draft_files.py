"""Files of trained drafters are read as written, and errors name a file that does not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from tests.backend.hf_models import llama, model_config
from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.weights.draft_files import (
    FORMAT,
    HEADS,
    INFO_FILE,
    TENSORS_FILE,
    DraftInfo,
    head_shapes,
    kind_of,
    open_trained,
    other_target,
    write_draft,
    write_info,
)
from tridecode.backend.weights.draft_files import MODEL as MODEL_KIND

MODEL = model_config(llama().config)
SIZES = MODEL.hidden_size, MODEL.vocab_size
INFO = DraftInfo(FORMAT, HEADS, "llama", *SIZES, 3, 24, "ab" * 32, [1.5, 1.7, 1.8])


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = head_shapes(INFO.hidden_size, INFO.width, INFO.depth)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_draft(tmp_path / "heads", INFO, tensors())
    return tmp_path / "heads"


def test_what_is_written_is_read(folder: Path) -> None:
    found = open_trained(folder, MODEL, HEADS)
    digest = hashlib.sha256((folder / TENSORS_FILE).read_bytes()).hexdigest()
    assert found.info == replace(INFO, digest=digest)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors().items())
    assert len(found.tensors) == 4


CHANGES: dict[str, tuple[dict[str, object], str]] = {
    "kind": ({"kind": "glide"}, "a drafter of kind 'glide'; speculation wants 'heads'"),
    "hidden size": ({"hidden_size": 50}, f"hidden_size 50; the served model has {MODEL.hidden_size}"),
    "vocabulary": ({"vocab_size": 96}, f"vocab_size 96; the served model has {MODEL.vocab_size}"),
    "depth": ({"depth": 16}, "depth 16; wanted 1 to 15"),
    "no depth": ({"depth": 0}, "depth 0; wanted 1 to 15"),
    "width": ({"width": 1 << 40}, "wanted 1 to 1,048,576"),
    "format": ({"format": "tridecode-draft-9"}, "format 'tridecode-draft-9'; this version reads"),
    "type": ({"depth": "three"}, "not a valid description"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_description_that_does_not_fit_is_named(folder: Path, case: str) -> None:
    change, wanted = CHANGES[case]
    path = folder / INFO_FILE
    path.write_text(json.dumps({**msgspec.to_builtins(INFO), **change}))
    with pytest.raises(ConfigError, match=wanted) as error:
        open_trained(folder, MODEL, HEADS)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "heads"}', "\xff", "[" * 100_000, " " * (2 << 20)])
def test_a_damaged_description_is_named(folder: Path, text: str) -> None:
    (folder / INFO_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="draft.json"):
        open_trained(folder, MODEL, HEADS)


def test_a_folder_without_a_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file.*train-draft"):
        open_trained(tmp_path, MODEL, HEADS)


def damage(path: Path, case: str) -> None:
    held = tensors()
    if case == "missing":
        path.unlink()
    elif case == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif case == "not safetensors":
        path.write_bytes(b"\x80\x04cposix\nsystem\n" * 100)
    elif case == "a tensor too few":
        del held["hidden.bias"]
    elif case == "a tensor too many":
        held["more"] = torch.zeros(1)
    elif case == "another shape":
        held["outs.weight"] = held["outs.weight"][:-1].contiguous()
    elif case == "integers":
        held = {name: tensor.to(torch.int8) for name, tensor in held.items()}
    if case in ("a tensor too few", "a tensor too many", "another shape", "integers"):
        save_file(held, path)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("missing", "No such file"),
        ("cut", "of [0-9,]+ bytes, is not a valid safetensors file"),
        ("not safetensors", "not a valid safetensors file"),
        ("a tensor too few", "has the tensors"),
        ("a tensor too many", "has the tensors"),
        ("another shape", "outs.weight is"),
        ("integers", "torch.int8; wanted float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, case: str, wanted: str) -> None:
    damage(folder / TENSORS_FILE, case)
    with pytest.raises(WeightFileError, match=wanted) as error:
        open_trained(folder, MODEL, HEADS)
    assert str(folder / TENSORS_FILE) in str(error.value)


def test_a_folder_that_lost_its_tensors_is_named(folder: Path) -> None:
    assert kind_of(folder) == HEADS
    (folder / TENSORS_FILE).unlink()
    with pytest.raises(ConfigError, match=f"heads describes heads in draft.json and has no {TENSORS_FILE}"):
        kind_of(folder)
    write_info(folder, replace(INFO, kind=MODEL_KIND))
    assert kind_of(folder) == "", "a draft model is a checkpoint"


def test_another_target_is_a_warning() -> None:
    assert "trained for the checkpoint abababababab" in other_target(INFO, "cd" * 32)
    assert other_target(INFO, INFO.target) == other_target(INFO, "") == ""
