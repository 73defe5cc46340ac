"""Files of torch.save read as data: every tensor as torch reads it, and nothing of the rest is run."""

from __future__ import annotations

import argparse
import enum
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.sources.torch_file import load, tensors_of
from tridecode.converters.sources.torch_pickle import Arguments, Region


class Phase(enum.Enum):
    TRAINING = 1


def saved(path: Path, tree: object, zipped: bool = True) -> Region:
    torch.save(tree, path, _use_new_zipfile_serialization=zipped)
    return Region.of_file(path)


def training_state() -> dict:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(7, 6, generator=generator)
    return {
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.float16, phase=Phase.TRAINING, ffn=None),
        "checkpoint_version": 3.0,
        "rng_state": [{"np_rng_state": np.random.get_state(), "torch": torch.get_rng_state()}],
        "model": {
            "language_model": {
                "transposed": base.t(),
                "slice": base[2:5, 1:],
                "parameter": torch.nn.Parameter(base.clone()),
                "shared": base,
                **{str(dtype): base.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
                "integers": torch.arange(5),
                "flags": torch.tensor([True, False]),
                "scalar": torch.tensor(3.5),
                "empty": torch.zeros(0, 4),
            },
            "ordered": torch.nn.Linear(3, 2).state_dict(),
        },
        "optimizer": {"scaler": Phase.TRAINING, "groups": [{"lr": 0.1}]},
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_every_tensor_is_read_as_torch_reads_it(tmp_path, zipped):
    state = training_state()
    tree = load(saved(tmp_path / "model.pt", state, zipped))
    arguments = tree["args"]
    assert isinstance(arguments, Arguments)
    assert arguments.values["num_layers"] == 2 and arguments.values["ffn"] is None
    assert arguments.values["params_dtype"] == torch.float16
    assert tree["checkpoint_version"] == 3.0
    wanted = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    wanted = {f"language_model.{name}": value for name, value in wanted["language_model"].items()} | {
        f"ordered.{name}": value for name, value in wanted["ordered"].items()
    }
    found = tensors_of(tree["model"], "model.pt")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tuple(tensor.shape) and found[name].dtype == tensor.dtype
        assert torch.equal(found[name].read(), tensor)


def test_a_file_within_another_one_is_read_in_place(tmp_path):
    inner = saved(tmp_path / "inner.pt", {"weight": torch.arange(12.0).reshape(3, 4)})
    for padding in (512, 513):  # aligned to the dtype, and not
        outer = tmp_path / f"outer-{padding}"
        outer.write_bytes(b"x" * padding + inner.path.read_bytes() + b"y" * 700)
        tree = load(Region(outer, padding, inner.size, "inner"))
        assert torch.equal(tree["weight"].read(), torch.arange(12.0).reshape(3, 4))


class Exploit:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_nothing_in_a_file_is_called(tmp_path):
    victim = tmp_path / "victim"
    calls = {
        "touch": (Path.touch, (victim,)),
        "exec": (exec, (f"open({str(victim)!r}, 'w')",)),
        "open": (open, (str(victim), "w")),
        "getattr": (getattr, (victim, "touch")),
    }
    for zipped in (True, False):
        for name, call in calls.items():
            region = saved(
                tmp_path / f"{name}-{zipped}.pt", {"w": torch.ones(2), "x": Exploit(*call)}, zipped
            )
            tree = load(region)
            assert torch.equal(tree["w"].read(), torch.ones(2))
    assert not victim.exists()


def test_a_file_cannot_change_what_reads_it(tmp_path):
    """BUILD writes into the object before it: a class, a function or a tensor of ours would be changed."""
    for target in (
        b"cargparse\nNamespace\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
    ):
        pickled = b"\x80\x02" + target + b"}X\x08\x00\x00\x00functionX\x01\x00\x00\x00xsb."
        path = tmp_path / "model.pt"
        path.write_bytes(
            pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + pickled
        )
        with pytest.raises(CheckpointError, match="model.pt is not a readable file of torch.save"):
            load(Region.of_file(path))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


DAMAGES = {
    "cut short": cut,
    "empty": lambda data: b"",
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 100,
    "a storage name changed": lambda data: data.replace(b"/data/0", b"/data/9"),
    "the pickle changed": lambda data: data.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_gives_one_clear_error_or_no_tensor(tmp_path, damage, zipped):
    region = saved(tmp_path / "model.pt", {"w": torch.ones(40, 50)}, zipped)
    changed = DAMAGES[damage](region.path.read_bytes())
    region.path.write_bytes(changed)
    try:
        found = tensors_of(load(Region.of_file(region.path)), "model.pt")
    except CheckpointError as error:
        assert "model.pt is not a readable file of torch.save" in str(error) and "\n" not in str(error)
    else:
        assert damage.endswith("changed") and (
            not found or torch.equal(found["w"].read(), torch.ones(40, 50))
        )


def test_a_tensor_outside_its_storage_is_refused(tmp_path):
    tensor = torch.ones(4)
    data = saved(tmp_path / "model.pt", {"w": tensor}, zipped=False).path.read_bytes()
    (tmp_path / "model.pt").write_bytes(data.replace(b"K\x04\x85", b"K\x09\x85"))  # its shape
    with pytest.raises(CheckpointError, match="lies outside its storage of 4 elements"):
        load(Region.of_file(tmp_path / "model.pt"))


def test_random_damage_never_gives_another_error(tmp_path):
    data = {
        zipped: saved(tmp_path / "m.pt", training_state(), zipped).path.read_bytes()
        for zipped in (True, False)
    }
    random = np.random.default_rng(3)
    for _ in range(150):
        for original in data.values():
            changed = bytearray(original)
            for at in random.integers(0, len(changed), 4):
                changed[at] = random.integers(0, 256)
            (tmp_path / "m.pt").write_bytes(changed)
            try:
                found = tensors_of(load(Region.of_file(tmp_path / "m.pt")), "m.pt")
                for tensor in found.values():
                    tensor.read()
            except CheckpointError:
                pass
