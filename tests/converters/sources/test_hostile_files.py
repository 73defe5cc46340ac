"""Files that try to exhaust their reader: refused by name within 5 s of processor time and 1 GiB."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from tests.bounded import bounded
from tests.converters.sources import hostile_files
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.sources import Checkpoint
from tridecode.converters.tokenizers.files import load_tokenizer, save_tokenizer

SECONDS = 5.0
PEAK_BYTES = 1 << 30
#: our own errors: whatever else comes out is a traceback to a user
OURS = ("CheckpointError", "UnsupportedError", "ConfigError", "WeightFileError", "RequestError")
CHECKPOINTS = {
    **hostile_files.GGUF,
    **hostile_files.TORCH_FILES,
    **hostile_files.ARCHIVES,
    **hostile_files.HEADERS,
}


def open_and_plan(path: Path) -> None:
    plan_conversion(open_checkpoint(path))


def read_tokenizer(folder: Path, target: Path) -> None:
    checkpoint = Checkpoint(folder, PreTrainedConfig(), None, None, [], tokenizer_dir=folder)
    save_tokenizer(load_tokenizer(checkpoint), folder, target)


def check(outcome, name: str, may_be_fine: bool = False) -> None:
    error = outcome.error
    print(f"{name}: {outcome.seconds:.2f} s, {outcome.peak_bytes / 2**20:.0f} MiB: {error[:200]}")
    assert error.split(":")[0] in OURS or (may_be_fine and not error), error
    assert outcome.seconds < SECONDS and outcome.peak_bytes < PEAK_BYTES
    assert "\n" not in error


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_that_exhausts_its_reader_is_refused(tmp_path, name) -> None:
    path = CHECKPOINTS[name](tmp_path)
    outcome = bounded(open_and_plan, path)
    check(outcome, name)
    assert str(tmp_path) in outcome.error


@pytest.mark.parametrize("name", hostile_files.TOKENIZERS)
def test_a_tokenizer_that_exhausts_its_reader_is_refused(tmp_path, name) -> None:
    source = tmp_path / "source"
    source.mkdir()
    outcome = bounded(read_tokenizer, hostile_files.TOKENIZERS[name](source), tmp_path / "written")
    check(outcome, name)
    assert str(tmp_path) in outcome.error
