"""Grades of quantised conversions, on the limits and next to them."""

from __future__ import annotations

import pytest

from tridecode.backend.weights.quantization import ROUNDED
from tridecode.converters.parity.grades import FAIR, GOOD, POOR, advice, grade, limits_of, lower
from tridecode.converters.quantize.methods import METHODS, method_of
from tridecode.tools.checks.grades import grade_faults

NAN = float("nan")


@pytest.mark.parametrize(
    ("mean_kl", "agreement", "wanted"),
    [
        (0.0, 1.0, GOOD),
        (0.01, 0.97, GOOD),
        (0.0101, 0.97, FAIR),
        (0.01, 0.969, FAIR),
        (0.1, 0.9, FAIR),
        (0.101, 1.0, POOR),
        (0.0, 0.899, POOR),
        (0.22, 0.649, POOR),
        (NAN, 1.0, POOR),
        (0.0, NAN, POOR),
    ],
)
def test_both_limits_hold(mean_kl, agreement, wanted):
    assert grade(mean_kl, agreement) == wanted


def test_the_lower_grade_counts():
    assert [lower(GOOD, FAIR), lower(POOR, GOOD), lower(FAIR, ""), lower("", GOOD)] == [
        FAIR,
        POOR,
        FAIR,
        GOOD,
    ]
    assert limits_of(POOR) == "fair needs a mean KL of at most 0.1 nats and 90% equal tokens"
    assert limits_of(GOOD) == "a mean KL of at most 0.01 nats and 97% equal tokens"


@pytest.mark.parametrize("name", [*ROUNDED, *METHODS])
def test_advice_names_methods_that_exist_and_never_the_one_that_was_used(name):
    found = ROUNDED[name] if name in ROUNDED else method_of(name).quantization
    text = advice(found.weights, found.activations, name)
    assert text.startswith("try ") and "--calibrate" in text
    named = {word.strip(",.") for word in text.split() if word.strip(",.") in (*ROUNDED, *METHODS)}
    assert name not in named
    assert named or name in ("int8-gptq", "int4-tuned")


def test_check_judges_the_figures_of_a_file_that_is_not_trusted():
    poor = {"weights": "int4", "activations": "", "mean_kl": 0.22, "agreement": 0.649}
    fine = {"weights": "int8", "activations": "", "mean_kl": 0.002, "agreement": 0.98}
    ((found, wanted, fix),) = grade_faults({"quantization": poor})
    assert found == "int4 is poor on fixed prompts: mean KL 0.22 nats, 64.9% equal tokens"
    assert wanted == "a mean KL of at most 0.1 nats and 90% equal tokens" and "int4-tuned" in fix
    assert list(grade_faults({"quantization": fine})) == []
    ((found, *_),) = grade_faults({"quantization": fine, "text": {"mean_kl": 0.3, "agreement": 0.5}})
    assert "given texts" in found
    for quality in (None, [], "x", {}, {"mean_kl": "0.2", "agreement": 0.1}, {"mean_kl": None}):
        assert list(grade_faults({"quantization": quality})) == []
    assert list(grade_faults({})) == []
