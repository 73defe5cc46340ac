"""`tridecode bench agree`: where two answers part, by how little, and that a wrong engine shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama
from tridecode.backend.engine.offline import Generation
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.bench.agree import PROMPTS, Difference, Side, answer, choose_sides, compare
from tridecode.tools.cli import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("agree") / "tiny")


def generation(rows: list[list[float]], keep: bool = True) -> Generation:
    """Greedy over these logits."""
    made = Generation()
    made.tokens = [int(np.argmax(row)) for row in rows]
    made.logits = [np.array(row, np.float32) for row in rows] if keep else []
    return made


ONE = generation([[1.0, 0.0, -2.0], [0.0, 4.0, 3.75], [9.0, 0.0, 0.0]])
SAME = generation([[1.0, 0.25, -2.0], [0.0, 4.0, 3.5], [9.0, 0.0, 0.5]])
OTHER = generation([[1.0, 0.0, -2.0], [0.5, 3.5, 4.0], [0.0, 9.0, 0.0]])


def test_the_first_difference_has_both_sides_logits_and_gaps() -> None:
    agreement = compare([ONE, ONE], [SAME, OTHER], "fp16")
    eps = 2.0**-10
    assert (agreement.prompts, agreement.identical, agreement.shortest) == (2, 1, 1)
    expected = Difference(
        prompt=1,
        step=1,
        tokens=(1, 2),
        logits=([4.0, 3.75], [3.5, 4.0]),
        gaps=(0.25, 0.5),
        error=0.5,
        unit=4.0 * eps,
    )
    assert agreement.differences == [expected]
    # tokens after the difference have another prefix and do not count: their logits differ by 9
    assert agreement.error == 0.5
    assert agreement.error_units == pytest.approx(max(0.25 / 2.0, 0.5 / 4.0) / eps, abs=0.01)


def test_answers_without_logits_are_compared_by_their_tokens() -> None:
    bare = generation([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]], keep=False)
    agreement = compare([ONE], [bare], "bf16")
    (difference,) = agreement.differences
    assert (difference.step, difference.tokens) == (1, (1, 2))
    assert difference.logits == ([4.0, 3.75], None) and difference.gaps == (0.25, None)
    assert difference.error is agreement.error is agreement.error_units is None


def test_a_gpu_is_held_against_the_cpu_in_every_precision(monkeypatch) -> None:
    assert list(map(str, choose_sides("cpu"))) == ["cpu fp32", "cpu bf16"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert list(map(str, choose_sides("cpu"))) == ["cpu fp32", "cpu bf16"]
    assert list(map(str, choose_sides("auto"))) == ["cpu fp32", "cuda fp32", "cuda fp16", "cuda bf16"]


def test_one_wrong_column_of_one_matrix_shows(checkpoint, tmp_path) -> None:
    weights = tmp_path / "weights"
    plan_conversion(open_checkpoint(checkpoint)).write(weights)
    prompts = [[5], [7, 9, 11]]
    right = answer(weights, Side("cpu", "fp32"), prompts, 6)
    again = answer(weights, Side("cpu", "fp32"), prompts, 6)
    assert compare(right.together, again.together, "fp32").error == 0.0
    assert [len(one.tokens) for one in right.together + right.alone + right.served] == [6] * 6
    assert all(one.logits for one in right.together + right.alone) and not any(
        one.logits for one in right.served
    )
    assert compare(right.together, right.alone, "fp32").error_units < 1000
    path = weights / "model.layers.0.attention.dense.weight.0.bin"
    values = np.fromfile(path, np.float32)
    values[0] += 0.01
    values.tofile(path)
    (weights / "manifest.json").unlink()  # it would refuse the change
    wrong = answer(weights, Side("cpu", "fp32"), prompts, 6)
    assert compare(right.together, wrong.together, "fp32").error_units > 100


def test_bench_agree_prints_and_writes_what_it_found(checkpoint, tmp_path) -> None:
    arguments = ["bench", "agree", "--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--tokens", "8", "--prompts", "5"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "agree-tiny.json").read_text()
    report = json.loads(text)
    assert str(checkpoint.parent) not in text.replace(report["environment"]["command"], "")
    engines = report["results"]["engines"]
    assert report["results"]["reference"] == "cpu fp32"
    assert {name: set(found) for name, found in engines.items()} == {
        "cpu fp32": {"alone", "served"},
        "cpu bf16": {"reference", "alone", "served"},
    }
    exact = engines["cpu fp32"]
    assert (exact["alone"]["identical"], exact["served"]["identical"]) == (5, 5)
    rough = engines["cpu bf16"]["reference"]
    assert rough["identical"] + len(rough["differences"]) == 5 and rough["error"] > exact["alone"]["error"]
    named = {str(token) for found in rough["differences"] for token in found["tokens"]}
    assert named <= set(report["results"]["texts"])
    assert "the reference is cpu fp32" in done.output and "5 of 5" in done.output


def test_more_prompts_than_there_are_and_more_tokens_than_fit_are_refused(checkpoint) -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 16
    arguments = ["bench", "agree", "--model", str(checkpoint), "--device", "cpu"]
    assert "--prompts is 17; there are 16" in CliRunner().invoke(app, [*arguments, "--prompts", "17"]).output
    done = CliRunner().invoke(app, [*arguments, "--tokens", "128"])
    assert "--tokens is 128; tiny has 128 positions" in done.output
