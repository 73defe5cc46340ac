"""The floors of decoding steps, against those of a script that is not ours, for the same formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tridecode.tools.bench.shapes.presets import PRESETS, QUANTIZATIONS
from tridecode.tools.bench.studies.floors import RUNS, table, traffic


@pytest.mark.parametrize(
    ("name", "quantization", "cache", "head", "gigabytes", "wanted"),
    [
        ("bloom-7b1", "", "auto", False, 14.138, (3.35, 3.76, 7.05, 19.62)),
        ("bloom-7b1", "int8", "auto", False, 8.098, (1.94, 2.35, 5.64, 19.62)),
        ("bloom-7b1", "int8", "auto", True, 7.071, (1.70, 2.11, 5.40, 19.62)),
        ("llama-3-8b", "", "auto", False, 15.010, (3.51, 3.62, 4.50, 8.89)),
        ("llama-3-8b", "int8", "auto", False, 8.031, (1.88, 1.99, 2.87, 8.89)),
        ("llama-3-8b", "int8", "auto", True, 7.505, (1.76, 1.87, 2.75, 8.89)),
        ("bloom-7b1", "w8a8-fp8", "fp8", True, 7.071, (1.67, 1.88, 3.53, 9.84)),
        ("llama-3-8b", "w8a8-fp8", "fp8", True, 7.505, (1.75, 1.78, 2.25, 4.46)),
    ],
)
def test_floors_of_512_tokens(name, quantization, cache, head, gigabytes, wanted) -> None:
    """These floors omit the scales of an 8-bit cache (3 %) and count logits in 16 bit."""
    chosen = PRESETS[name]
    model = replace(chosen.model, quantization=QUANTIZATIONS[quantization] if quantization else None)
    found = traffic(model, chosen.dtype, cache, head)
    assert found.weights == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert [found.floor_ms(rows) for rows in (1, 8, 64, 256)] == pytest.approx(wanted, rel=0.035)


def test_4_bit_weights_have_half_a_byte_a_scale_and_a_zero() -> None:
    model = PRESETS["llama-3-8b"].model
    found = traffic(replace(model, quantization=QUANTIZATIONS["int4"]), "bf16", int8_head=True)
    head = model.vocab_size * model.hidden_size
    assert found.weights == pytest.approx(found.multiplied * (0.5 + 5 / 128) + head, rel=1e-3)


def test_prompts_take_what_their_products_take() -> None:
    found = traffic(PRESETS["llama-3-8b"].model, "bf16")
    assert found.prompts_floor_ms(2048) == pytest.approx(2 * 2048 * 6.979e9 / 790e12 * 1000, rel=1e-3)
    assert found.prompts_floor_ms(1) == pytest.approx(3.491, rel=1e-3)


def test_the_table_has_every_run_with_its_figures() -> None:
    lines = table().splitlines()[2:]
    assert len(lines) == len(RUNS)
    assert lines[3].startswith("| LLaMA-3-8B bf16 | 3.85 / 3.9 / 3.51 (91 %) | ")
