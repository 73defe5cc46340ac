"""build-repo --quantize: the content of PARITY.json, and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.checkpoints import FAMILIES, greedy, save
from tests.quantized import rounded_fp8, rounded_fp8_blocks, rounded_int8, rounded_model
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.models import family, read_model_config
from tridecode.backend.models.quantized_parts import read_quantized
from tridecode.backend.weights.quantization import ROUNDED, Quantization
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import NEW_TOKENS, fixed_prompts
from tridecode.converters.parity.grades import Floor
from tridecode.converters.parity.quantized import divergence
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.build_repo.options import floor_of, quantization_of
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.demo import packaged_model

INT8, INT4 = Quantization("int8"), Quantization("int4", group=16, zeros=True)


def test_divergence_is_that_of_the_formula() -> None:
    source, ours = np.log([[0.5, 0.25, 0.25], [1.0, 1.0, 2.0]]), np.log([[0.25, 0.5, 0.25], [1.0, 1.0, 2.0]])
    wanted = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    np.testing.assert_allclose(
        divergence(source.astype(np.float32), ours.astype(np.float32)), [wanted, 0], atol=1e-7
    )


def test_parity_tells_divergence_agreement_and_errors(tmp_path: Path) -> None:
    """The repository agrees with transformers whose weights the test has rounded."""
    case = FAMILIES["llama"]
    model = case()
    save(model, tmp_path / "hf", tokenizer=False)
    build_repo(
        tmp_path / "hf", tmp_path / "repo", dtype="fp32", quantization=INT8, quantization_floor=Floor(9, 0)
    )
    assert not [finding for finding in check_repo(tmp_path / "repo") if finding.severity == "error"]
    parity = json.loads((tmp_path / "repo" / "PARITY.json").read_text())
    found = parity["quantization"]
    plan = plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32", None, INT8)
    rounded = rounded_model(model, plan, turned=True)
    every, equal = [], 0
    for _, prompt in fixed_prompts(None, plan.config):
        (theirs, source), (ours, logits) = (greedy(one, prompt, NEW_TOKENS) for one in (model, rounded))
        for a, b, p, q in zip(theirs, ours, source.double(), logits.double()):
            log_p, log_q = p.log_softmax(0), q.log_softmax(0)
            every.append(float((log_p.exp() * (log_p - log_q)).sum()))
            equal += a == b
            if a != b:
                break
    assert found["steps"] == len(every)
    assert found["agreement"] == equal / len(every)
    assert found["mean_kl"] == pytest.approx(np.mean(every), rel=1e-2)
    assert found["largest_kl"] == pytest.approx(max(every), rel=1e-2)
    name = "model.layers.0.attention.dense.weight"
    weights = [m.state_dict()["model.layers.0.self_attn.o_proj.weight"].double() for m in (model, rounded)]
    wanted = float((weights[1] - weights[0]).norm() / weights[0].norm())
    assert found["weight_errors"][name] == pytest.approx(wanted, rel=1e-2)
    assert len(found["weight_errors"]) == 5 * plan.config.num_layers
    assert read_model_config(next((tmp_path / "repo").glob("*/1/1-gpu"))).quantization == INT8


def test_a_poor_model_passes_its_floor_with_a_warning(tmp_path: Path) -> None:
    """int4 changes most tokens of random weights: PARITY.json has one agreement, and null where no bound
    holds."""
    source = save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)
    printed = io.StringIO()
    build_repo(
        source,
        tmp_path / "repo",
        dtype="fp32",
        quantization=INT4,
        quantization_floor=Floor(99, 0),
        console=Console(file=printed, width=500),
    )
    parity = json.loads((tmp_path / "repo" / "PARITY.json").read_text())
    found = parity["quantization"]
    assert found["mean_kl"] > 0.1 or found["agreement"] < 0.9
    assert parity["passed"] and found["grade"] == "poor"
    assert parity["greedy_agreement"] == found["agreement"]
    assert parity["logit_error_bound"] is None and parity["reference_difference"] is None
    assert "quality: poor (fair needs a mean KL of at most 0.1 nats" in printed.getvalue()
    assert "try --quantize int4-awq-gptq or int4-tuned or int8" in printed.getvalue()
    (warned,) = [str(item) for item in check_repo(tmp_path / "repo") if item.where == "PARITY.json"]
    assert warned.startswith("warning: PARITY.json: found int4 is poor on fixed prompts")


def test_a_model_that_is_not_quantised_has_a_bound_and_no_grade(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)
    build_repo(tmp_path / "hf", tmp_path / "repo", dtype="fp32")
    parity = json.loads((tmp_path / "repo" / "PARITY.json").read_text())
    assert parity["quantization"] is None and parity["logit_error_bound"] > 0
    assert parity["reference_difference"] is None and parity["greedy_agreement"] == 1.0


def test_a_model_below_the_floor_is_refused_with_its_figures(tmp_path: Path) -> None:
    save(FAMILIES["gpt2"](), tmp_path / "hf", tokenizer=False)
    with pytest.raises(CheckpointError, match=r"mean KL .* nats \(floor 1e-09\).*--quantize-floor"):
        build_repo(
            tmp_path / "hf",
            tmp_path / "repo",
            dtype="fp32",
            quantization=Quantization("int4", group=16, zeros=True),
            quantization_floor=Floor(1e-9, 1),
        )
    assert not (tmp_path / "repo").exists()


def test_a_quantised_directory_is_not_a_source(tmp_path: Path) -> None:
    save(FAMILIES["gpt2"](), tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(str(tmp_path / "hf")), "fp32", None, INT8).write(tmp_path / "w")
    with pytest.raises(CheckpointError, match=r"is quantised \(int8\); build from the checkpoint"):
        open_checkpoint(str(tmp_path / "w"))


def test_options_are_checked() -> None:
    assert quantization_of("int4", 64) == Quantization("int4", group=64, zeros=True)
    assert quantization_of("fp8", 64) == Quantization("fp8")
    assert quantization_of("w8a8-fp8-blocks", 64) == Quantization("fp8", 128, 128, activations="fp8")
    assert quantization_of(None, 64) is None
    assert floor_of("0.1,0.9") == Floor(0.1, 0.9)
    with pytest.raises(ConfigError, match="--quantize int3: wanted one of int8, int8-nearest, fp8, int4"):
        quantization_of("int3", 128)
    for text in ("1", "a,b", "nan,1", "0.5,2", "-1,0"):
        with pytest.raises(ConfigError, match=f"--quantize-floor {text}: wanted KL,SHARE"):
            floor_of(text)


@pytest.mark.parametrize("name", ["w8a8-int8", "w8a8-fp8", "w8a8-fp8-blocks"])
def test_products_in_8_bit_are_built_and_compared(name: str, tmp_path: Path) -> None:
    """The stored values equal numpy's rounding; 200 inputs and 344 outputs leave the last blocks
    incomplete."""
    model = FAMILIES["llama"](hidden_size=200, intermediate_size=344, num_attention_heads=4)
    source = save(model, tmp_path / "hf", tokenizer=False)
    build_repo(
        source, tmp_path / "repo", dtype="fp32", quantization=ROUNDED[name], quantization_floor=Floor(9, 0)
    )
    assert not [finding for finding in check_repo(tmp_path / "repo") if finding.severity == "error"]
    weights = next((tmp_path / "repo").glob("*/1/1-gpu"))
    config = read_model_config(weights)
    assert config.quantization == ROUNDED[name]
    found = json.loads((tmp_path / "repo" / "PARITY.json").read_text())["quantization"]
    assert (found["weights"], found["activations"]) == (config.quantization.weights,) * 2
    reader, gate = WeightReader(weights, config), "model.layers.0.mlp.gate_proj.weight"
    spec = next(item for item in family("llama").weight_specs(config) if item.name == gate)
    stored = read_quantized(spec, config.quantization, lambda part: reader.read(reader.specs[part]), 0, 1)
    exact = model.state_dict()["model.layers.0.mlp.gate_proj.weight"].numpy()
    wanted = {"w8a8-int8": rounded_int8, "w8a8-fp8": rounded_fp8, "w8a8-fp8-blocks": rounded_fp8_blocks}
    np.testing.assert_allclose(stored.expanded().numpy(), wanted[name](exact), rtol=1e-6)


@pytest.mark.nightly  # a whole trained model; the tests above build tiny ones in every format
@pytest.mark.slow
def test_smollm2_in_int8_says_nearly_what_it_says_in_fp32(tmp_path: Path) -> None:
    """docs/guides/quantization.md has the figures: mean KL 0.004 nats, 94 % of the tokens."""
    build_repo(packaged_model(), tmp_path / "repo", dtype="fp32", quantization=INT8)
    found = json.loads((tmp_path / "repo" / "PARITY.json").read_text())["quantization"]
    assert found["mean_kl"] < 0.01
    assert found["agreement"] > 0.9
    assert max(found["weight_errors"].values()) < 0.015
