"""train-draft on a GPU: every kind of drafter is trained, evaluated and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.train_draft.test_train_draft import learnt_model, write_prompts
from tridecode.backend.weights.draft_files import INFO_FILE
from tridecode.tools.cli import app

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("kind", "rate"), [("heads", 3e-3), ("glide", 5e-3), ("model", 1e-3)])
def test_every_kind_learns_on_a_gpu(tmp_path: Path, kind: str, rate: float) -> None:
    model = learnt_model(tmp_path / "hf", 2)
    prompts, output = write_prompts(tmp_path / "ids.jsonl"), tmp_path / "drafter"
    options = ["--text-tokens", 24, "--prompt-tokens", 8, "--tokens", 2400, "--held-back", 8, "--layers", 1]
    options += ["--prompts", prompts, "--epochs", 20, "--batch", 256, "--depth", 3, "--rate", rate]
    options += ["--model", model, "--output", output, "--kind", kind, "--device", "cuda"]
    done = CliRunner().invoke(app, ["train-draft", *map(str, options)])
    assert done.exit_code == 0, (done.output, done.exception)
    rates = json.loads((output / INFO_FILE).read_text())["tokens_per_step"]
    assert len(rates) == 3 and rates[0] > 1.2
