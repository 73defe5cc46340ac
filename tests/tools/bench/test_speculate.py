"""`tridecode bench speculate` on a toy model: forced drafts give the plain text in a third of the steps."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import ConfigError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.speculate.run import SpeculatePlan, batches_of, run_speculate
from tridecode.tools.cli import app


def test_forced_drafts_give_three_tokens_a_step_and_the_plain_text(tmp_path) -> None:
    job = make_job(
        "toy", None, None, device="cpu", batches=(64,), prompt_tokens=20, output_tokens=37,
        speculation="lookup",
    )  # fmt: skip
    run_speculate(SpeculatePlan((1, 3), 4, 2, 1), job, tmp_path)
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["results"]["rows"]
    assert [(row["batch"], row["kind"]) for row in rows[:4]] == [
        (1, "plain"), (1, "forced"), (1, "sampled"), (1, "sampled, drafts")
    ]  # fmt: skip
    for row in rows:
        assert row["same_text"] and row["step_ms"] > 0 and row["tokens_per_s"] > 0
        if row["kind"] == "forced":
            assert row["tokens_per_step"] == pytest.approx(3.0, abs=0.3)
            assert row["drafted"] > row["accepted"] > 20 * row["batch"]
        elif row["kind"] != "sampled, drafts":
            assert row["drafted"] == 0
    assert (tmp_path / "speculate-toy.png").stat().st_size > 5000


def test_a_draft_model_is_measured_with_its_own_drafts_and_forced_ones(tmp_path) -> None:
    job = make_job(
        "toy", None, None, device="cpu", batches=(64,), prompt_tokens=20, output_tokens=37,
        speculation="draft", draft="toy",
    )  # fmt: skip
    run_speculate(SpeculatePlan((2,), 4, 2, 1), job, tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.name == "speculate-toy-toy.json"
    rows = {row["kind"]: row for row in json.loads(path.read_text())["results"]["rows"]}
    assert list(rows) == ["plain", "forced", "sampled", "sampled, drafts", "greedy", "own drafts"]
    assert all(row["same_text"] and row["step_ms"] > 0 for row in rows.values())
    assert rows["forced"]["tokens_per_step"] == pytest.approx(3.0, abs=0.3)
    assert rows["forced"]["drafted"] > rows["forced"]["accepted"] > 40
    assert rows["forced"]["step_ratio"] > 1.5, "four drafts of a model of the target's size"


@pytest.mark.parametrize("kind", ["heads", "glide"])
def test_a_random_trained_drafter_is_measured_with_forced_drafts(tmp_path, kind: str) -> None:
    job = make_job(
        "toy", None, None, device="cpu", batches=(64,), prompt_tokens=20, output_tokens=37,
        speculation=kind,
    )  # fmt: skip
    run_speculate(SpeculatePlan((2,), 4, 2, 1), job, tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.name == f"speculate-toy-{kind}.json"
    rows = {row["kind"]: row for row in json.loads(path.read_text())["results"]["rows"]}
    assert list(rows) == ["plain", "forced", "sampled", "sampled, drafts"]
    assert all(row["same_text"] and row["step_ms"] > 0 for row in rows.values())
    assert rows["forced"]["tokens_per_step"] == pytest.approx(3.0, abs=0.3)


def test_a_checkpoint_of_train_draft_is_a_draft_model(tmp_path) -> None:
    model = FAMILIES["gpt2"](**FAMILIES["gpt2"].shared)
    folder = save(model, tmp_path / "hf")
    plan_conversion(open_checkpoint(str(folder))).write(tmp_path / "weights")
    job = make_job(
        "toy", tmp_path / "weights", None, device="cpu", batches=(64,), prompt_tokens=8,
        output_tokens=33, speculation="draft", draft=str(folder),
    )  # fmt: skip
    run_speculate(SpeculatePlan((1,), 4, 2, 1), job, tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.json")
    rows = {row["kind"]: row for row in json.loads(path.read_text())["results"]["rows"]}
    assert rows["own drafts"]["accepted"] >= 0.9 * rows["own drafts"]["drafted"]
    assert rows["forced"]["tokens_per_step"] == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize(
    "options",
    [
        ["--heads", "."],
        ["--heads", "random", "--draft", "toy"],
        ["--model", ".", "--heads", "random"],
        ["--glide", "."],
        ["--glide", "random", "--heads", "random"],
    ],
)
def test_a_drafter_of_another_kind_of_weights_is_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "speculate", *options])
    assert done.exit_code == 2 and "wanted random with --preset, a folder with --model" in done.output


@pytest.mark.parametrize("given", [dict(preset="toy", draft="."), dict(directory=".", draft="toy")])
def test_random_and_real_weights_are_not_mixed(tmp_path, given: dict) -> None:
    job = Job(device="cpu", batches=(64,), speculation="draft", **given)
    with pytest.raises(ConfigError, match="--draft is .*; wanted a folder with --model"):
        run_speculate(SpeculatePlan((1,), 4, 2, 1), job, tmp_path)


@pytest.mark.parametrize("text", ["", "1,x", "0,4", "1,,2"])
def test_impossible_batches_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--batches is"):
        batches_of(text)


def test_more_right_drafts_than_drafts_are_refused(tmp_path) -> None:
    job = make_job("toy", None, None, device="cpu", batches=(64,), speculation="lookup")
    with pytest.raises(ConfigError, match="--right is 5 of 4 drafts"):
        run_speculate(SpeculatePlan((1,), 4, 5, 1), job, tmp_path)
