"""The memory of a conversion and of a load, pages of files apart: one tensor and a fixed amount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.converters.sources import sparse_checkpoint

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SETTINGS = sparse_checkpoint.config(hidden=1024, layers=6, vocab=32768, inner=4096)
LARGEST = 32768 * 1024 * 4  # the embedding, float32: 128 MiB
#: mapped pages, parts of tensors, and what torch allocates itself; a part of the GiB of a real conversion
ALLOWANCE = 160 * MIB


def measured(*arguments: str | Path | int) -> dict[str, float]:
    """Measure in a separate process, so that the peak contains nothing else."""
    command = [sys.executable, "-m", "tests.converters.sources.sparse_checkpoint", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    total = sparse_checkpoint.write(folder / "safetensors", SETTINGS)
    assert total > LARGEST + ALLOWANCE + 192 * MIB  # all of it would not pass
    return folder


def test_a_conversion_holds_one_tensor_and_a_load_less(checkpoints, tmp_path):
    found = measured("convert", checkpoints / "safetensors", tmp_path / "w", "fp16", 2, "small")
    assert found["anonymous"] < LARGEST + ALLOWANCE
    read = measured("load", tmp_path / "w", 1)
    assert read["anonymous"] < LARGEST // 2 + ALLOWANCE // 2
    written = torch.from_file(str(tmp_path / "w" / "model.wte.bin"), size=32768 * 1024, dtype=torch.float16)
    assert not written.any()


def test_a_pickled_checkpoint_is_mapped_too(tmp_path):
    settings = sparse_checkpoint.config(hidden=512, layers=2, vocab=65536, inner=2048)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    state = {name: torch.full(shape, 0.5) for name, shape in sparse_checkpoint.shapes(settings).items()}
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    del state
    found = measured("convert", tmp_path / "hf", tmp_path / "w", "bf16", 1, "small")
    assert found["anonymous"] < 128 * MIB + ALLOWANCE
