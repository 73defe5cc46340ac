"""The memory table of docs/guides/quantization.md equals the memory plan."""

from __future__ import annotations

from pathlib import Path

from tridecode.kernels import scratch
from tridecode.tools.bench.studies.memory_table import CARDS, plan, rows, sequences, share

DOCUMENT = Path(__file__).parents[4] / "docs" / "guides" / "quantization.md"


def test_the_document_has_the_planned_figures(monkeypatch) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for line in (*rows("bloom-7b1"), *rows("llama-3-8b")):
        assert line in text
    assert "52.0 % of fp16's memory with 64 sequences and steps of 2,048 tokens (7.60 of 14.63\nGB)" in text
    assert share(64, 2048).endswith("int8 takes 7.60 of 14.63 GB, 52.0%")
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 0)
    assert "52.7 % (7.70 GB)" in text and share(64, 2048).endswith("int8 takes 7.70 of 14.63 GB, 52.7%")


def test_an_8_bit_cache_holds_nearly_twice_as_many_sequences() -> None:
    """Each token of a head takes 128 bytes and a scale of 4 bytes instead of 256 bytes."""
    half, whole = plan("bloom-7b1", "", False, "fp8"), plan("bloom-7b1", "", False, "auto")
    assert half.block * 256 == whole.block * 132
    assert sequences(half, CARDS[1]) > 1.9 * sequences(whole, CARDS[1])
