"""train-draft --kind glide: what the layer learns, and its figures against the paper's module."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.backend.engine.glide_layers import PaperGlide
from tests.checkpoints import FAMILIES, save
from tests.tools.train_draft.test_train_draft import (
    greedy,
    learnt_model,
    run,
    train,
    write_prompts,
)
from tridecode.backend.weights.draft_files import (
    TENSORS_FILE,
    DraftInfo,
    TrainedDraft,
    glide_shapes,
    read_info,
)
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

COMMON = ("--kind", "glide", "--batch", 256, "--depth", 3)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Path:
    """A LLaMA of two layers whose language has one successor for each token."""
    return learnt_model(tmp_path_factory.mktemp("learnt") / "hf", 2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "ids.jsonl")


def test_the_layer_learns_what_the_target_writes(learnt: Path, prompts: Path, tmp_path: Path) -> None:
    small = (*COMMON, "--tokens", 2400, "--held-back", 8, "--prompts", prompts)
    first = train(learnt, tmp_path / "a", *small, "--epochs", 1, "--rate", 1e-4)["tokens_per_step"]
    small = (*small, "--epochs", 8, "--rate", 5e-3)
    info = train(learnt, tmp_path / "b", *small)
    rates = info["tokens_per_step"]
    assert first[2] + 1.0 < rates[2] and rates[0] > 1.9 and rates[2] > 3.5, (first, rates)
    assert info["kind"] == "glide" and info["layer"] == 1 and info["width"] == 96
    assert (info["num_heads"], info["num_kv_heads"], info["head_size"]) == (3, 3, 16)
    found = {name: tuple(x.shape) for name, x in load_file(tmp_path / "b" / TENSORS_FILE).items()}
    assert found == glide_shapes(48, 96, 3, 3, 16)
    again = train(learnt, tmp_path / "c", *small)
    assert again == info, "the same seed, the same digest"


def test_the_figures_are_those_of_the_papers_module(learnt: Path, prompts: Path, tmp_path: Path) -> None:
    """Step by step, with drafts of the file's tensors behind the tokens that were kept."""
    small = (*COMMON, "--tokens", 1200, "--held-back", 20, "--epochs", 6, "--seed", 3, "--width", 40)
    info = train(learnt, tmp_path / "a", *small, "--prompts", prompts, "--rate", 3e-3)
    converted = plan_conversion(open_checkpoint(learnt)).config
    facts: DraftInfo = read_info(tmp_path / "a", converted, "glide")
    trained = TrainedDraft(facts, load_file(tmp_path / "a" / TENSORS_FILE))
    model = AutoModelForCausalLM.from_pretrained(learnt).eval()
    paper = PaperGlide(AutoModelForCausalLM.from_pretrained(learnt).eval(), trained)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    order = np.random.default_rng(3).permutation(len(rows))
    tokens = steps = 0
    for index in order[-20:]:
        text = greedy(model, rows[index], 24)
        ids, newest = text.ids.tolist(), text.prompt
        while newest < len(ids) - 1:
            drafts = paper.drafts(ids[: newest + 1], newest, 3)[0]
            kept = 0
            while kept < 3 and newest + kept + 1 < len(ids) and drafts[kept] == ids[newest + kept + 1]:
                kept += 1
            tokens, steps = tokens + min(kept + 1, len(ids) - 1 - newest), steps + 1
            newest += kept + 1
    assert 1.2 < tokens / steps < 3.9
    assert info["tokens_per_step"][2] == pytest.approx(tokens / steps, rel=0.02)  # the tool rounds to 16 bit


def test_a_weight_directory_of_another_family_is_a_target_too(tmp_path: Path) -> None:
    folder = save(FAMILIES["bloom"](), tmp_path / "hf")
    plan_conversion(open_checkpoint(folder), "fp32").write(tmp_path / "weights")
    small = ("--tokens", 1000, "--held-back", 4, "--epochs", 1, "--temperature", 0.5)
    info = train(tmp_path / "weights", tmp_path / "a", *COMMON, *small)
    assert info["family"] == "bloom" and all(1 <= rate <= 4 for rate in info["tokens_per_step"])


def test_a_target_that_cannot_have_a_layer_is_named(tmp_path: Path) -> None:
    folder = save(FAMILIES["llama"](**FAMILIES["llama"].variants["longrope"]), tmp_path / "hf")
    done = run("--model", folder, "--output", tmp_path / "a", *COMMON, "--tokens", 300)
    assert done.exit_code == 2 and "longrope" in done.output.replace("\n", " "), done.output
    assert not (tmp_path / "a").exists()
