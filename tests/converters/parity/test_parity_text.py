"""build-repo --parity-text: KL and agreement on given texts, against transformers read by the test."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, TEXTS, save
from tests.quantized import rounded_model
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.tokenizers.files import load_tokenizer
from tridecode.tools.build_repo import commands as repo_commands


def test_kl_agreement_and_errors_are_those_of_transformers(tmp_path: Path) -> None:
    model, texts = FAMILIES["llama"](), TEXTS[:3]
    source, file = save(model, tmp_path / "hf"), tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    repo_commands.build_repo(
        str(source),
        tmp_path / "repo",
        quantize="int8-nearest",
        quantize_floor="5,0",
        dtype="fp32",
        parity_text=file,
    )
    parity = json.loads((tmp_path / "repo" / "PARITY.json").read_text())
    found, int8 = parity["text"], Quantization("int8")
    planned = plan_conversion(open_checkpoint(source), "fp32", None, int8)
    rounded, tokenizer = rounded_model(model, planned, turned=True), load_tokenizer(planned.checkpoint)
    every, equal = [], []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)])
        assert ids.shape[1] < 128  # one sequence
        with torch.no_grad():
            p, q = (one(ids).logits[0].double().log_softmax(-1) for one in (model, rounded))
        every.append((p.exp() * (p - q)).sum(-1))
        equal.append(p.argmax(-1) == q.argmax(-1))
    kl = torch.cat(every)
    assert found["tokens"] == len(kl)
    assert found["sha256"] == sha256(file.read_bytes()).hexdigest()
    assert found["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-2)
    assert found["agreement"] == pytest.approx(float(torch.cat(equal).double().mean()), abs=1e-6)
    errors = parity["quantization"]
    assert errors["product_errors_on"] == "fixed prompts"
    assert errors["product_errors"].keys() == errors["weight_errors"].keys()
    assert all(0 < error < 0.05 for error in errors["product_errors"].values())


def test_a_comparison_that_is_switched_off_reads_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--parity-text .* with --no-parity"):
        repo_commands.build_repo("x", tmp_path / "repo", parity_text=tmp_path / "t.jsonl", parity=False)
