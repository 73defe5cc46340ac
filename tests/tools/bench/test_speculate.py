"""`tridecode bench speculate` on a toy model: forced drafts give the plain text in a third of the steps."""

from __future__ import annotations

import json

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.speculate.run import SpeculatePlan, batches_of, run_speculate


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


@pytest.mark.parametrize("text", ["", "1,x", "0,4", "1,,2"])
def test_impossible_batches_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--batches is"):
        batches_of(text)


def test_more_right_drafts_than_drafts_are_refused(tmp_path) -> None:
    job = make_job("toy", None, None, device="cpu", batches=(64,), speculation="lookup")
    with pytest.raises(ConfigError, match="--right is 5 of 4 drafts"):
        run_speculate(SpeculatePlan((1,), 4, 5, 1), job, tmp_path)
