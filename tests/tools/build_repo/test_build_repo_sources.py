"""Repositories from sources that lack something, or are not Hugging Face's: what is built, what is said."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.checkpoints import save, tiny_gpt2, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity import reference as parity_reference
from tridecode.converters.sources import Checkpoint
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.demo import run_demo


def built(source: Path, output: Path, **options) -> str:
    """Build `output`; returns what was said."""
    said = io.StringIO()
    build_repo(source, output, console=Console(file=said, soft_wrap=True), **options)
    return said.getvalue()


def test_without_a_tokenizer_a_repository_has_the_models_of_token_ids(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    said = built(source, tmp_path / "repo")
    assert f"{source} has no tokenizer: the repository gets the models of token ids only" in said
    models = {path.name for path in (tmp_path / "repo").iterdir() if path.is_dir()}
    assert models == {"fastertransformer", "fastertransformer_streaming", "tridecode_health"}
    assert not list((tmp_path / "repo").rglob("tokenizer*"))
    assert check_repo(tmp_path / "repo", checksums=True) == []
    parity = json.loads((tmp_path / "repo/PARITY.json").read_text())
    assert parity["passed"] and parity["tokenizer"]["file"] == "none"
    assert len(parity["prompts"]) >= 4
    assert all(prompt["prompt"].endswith("random ids") for prompt in parity["prompts"])
    assert set(parity["checksums"]) == {"config.ini", "manifest.json"}


def test_other_bytes_than_were_compared_show_without_a_tokenizer_too(tmp_path):
    built(save(tiny_gpt2(), tmp_path / "hf", tokenizer=False), tmp_path / "repo")
    parity = json.loads((tmp_path / "repo/PARITY.json").read_text())
    parity["checksums"]["config.ini"] = "0" * 64
    (tmp_path / "repo/PARITY.json").write_text(json.dumps(parity))
    errors = [finding for finding in check_repo(tmp_path / "repo") if finding.severity == "error"]
    assert any(finding.where == "config.ini" for finding in errors)


def test_a_model_that_memory_does_not_hold_is_converted_and_not_compared(tmp_path, monkeypatch):
    source = save(tiny_gpt2(), tmp_path / "hf")
    monkeypatch.setattr(parity_reference, "available_memory", lambda: 20_000)
    said = built(source, tmp_path / "repo")
    assert "the result is not compared: the comparison needs 0.0 GiB of memory (cpu)" in said
    result = json.loads((tmp_path / "repo/PARITY.json").read_text())
    assert result["passed"] is None and "are available" in result["reference"]["none"]


def test_a_tokenizer_named_beside_it_brings_the_text_models_back(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    said = built(source, tmp_path / "repo", parity=False, tokenizer=tmp_path / "tokenizer")
    assert "no tokenizer" not in said
    assert (tmp_path / "repo/ensemble/config.pbtxt").is_file()


def test_a_damaged_tokenizer_is_not_a_missing_one(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not valid JSON"):
        build_repo(source, tmp_path / "repo")
    with pytest.raises(CheckpointError, match="has no tokenizer; wanted tokenizer.json"):
        build_repo(source, tmp_path / "repo", tokenizer=tmp_path)


def test_the_demo_of_a_model_without_a_tokenizer_says_so(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    with pytest.raises(CheckpointError, match="has no tokenizer, so it has no text model"):
        run_demo(str(source), cache=tmp_path / "cache")


def test_an_adapter_is_not_merged_into_a_weight_directory(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(source)).write(tmp_path / "weights")
    with pytest.raises(ConfigError, match="is a weight directory; --lora wants the checkpoint"):
        build_repo(tmp_path / "weights", tmp_path / "repo", lora=tmp_path / "adapter")


def test_without_a_reference_parity_says_so_and_still_tells_other_bytes(tmp_path, monkeypatch):
    """transformers' GPT-2 cannot be the reference here: a source that brings none stands in."""
    source = save(tiny_gpt2(), tmp_path / "hf")
    monkeypatch.setattr(Checkpoint, "has_reference", False)
    said = built(source, tmp_path / "repo")
    assert "the result is not compared: transformers has no class for gpt2" in said
    parity = json.loads((tmp_path / "repo/PARITY.json").read_text())
    assert parity["passed"] is None and "no class for gpt2" in parity["reference"]["none"]
    [finding] = check_repo(tmp_path / "repo", checksums=True)
    assert finding.severity == "warning" and finding.found.startswith("nothing compared: transformers has no")
    parity["checksums"]["config.ini"] = "0" * 64
    (tmp_path / "repo/PARITY.json").write_text(json.dumps(parity))
    assert "error" in {finding.severity for finding in check_repo(tmp_path / "repo")}
    parity["passed"] = False
    (tmp_path / "repo/PARITY.json").write_text(json.dumps(parity))
    assert "no passed comparison" in {finding.found for finding in check_repo(tmp_path / "repo")}


def test_more_tokens_than_a_learned_table_has_are_refused_before_anything_is_written(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    with pytest.raises(
        ConfigError, match="max_sequence_tokens is 129; .*a learned table, model.wpe, of 128 rows"
    ):
        build_repo(source, tmp_path / "repo", engine_settings={"max_sequence_tokens": 129})
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_more_tokens_than_positions_that_are_computed_are_built_with_a_warning(tmp_path):
    source = save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    said = built(source, tmp_path / "repo", engine_settings={"max_sequence_tokens": 256}, parity=False)
    assert "warning: max_sequence_tokens 256 is beyond the model's 128 positions" in said
