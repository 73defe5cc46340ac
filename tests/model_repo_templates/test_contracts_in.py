"""Finds the contracts of a repository, and the option that builds a missing model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridecode.model_repo_templates.contracts_in import contracts_in, in_words, options_for, with_advice
from tridecode.model_repo_templates.repository import engine_texts, repository_models, write_models
from tridecode.model_repo_templates.served import DEFAULT, SERVED


def repository(folder: Path, **options) -> Path:
    write_models(
        folder, repository_models(**options), engine=engine_texts({}, "test"), model_type="GPT",
        checkpoint_path="1-gpu", stop_ids="",
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    "contracts", [DEFAULT, ("tensorrt_llm",), ("fastertransformer",), ("tensorrt_llm_tokens",), tuple(SERVED)]
)
def test_a_repository_is_known_by_its_doors_whatever_its_models_are_called(tmp_path, contracts):
    built = repository(tmp_path, contracts=contracts, owners=contracts)
    assert set(contracts_in(built)) == set(contracts)


def test_a_repository_without_a_tokenizer_has_the_contracts_of_token_ids(tmp_path):
    both = ["fastertransformer", "tensorrt_llm_tokens"]
    built = repository(tmp_path, contracts=both, owners=both, has_tokenizer=False)
    assert contracts_in(built) == both


def test_stand_ins_are_not_contracts_and_have_every_parameter_they_need(tmp_path):
    assert contracts_in(repository(tmp_path, stand_ins=True)) == list(DEFAULT)
    text = (tmp_path / "vllm_model" / "config.pbtxt").read_text()
    assert 'key: "made_by"' in text and "--contract vllm" in text and '"sampling_parameters"' in text
    door = (tmp_path / "vllm_model" / "1" / "model.py").read_text()
    assert "tridecode.backend.doors.absent import" in door


def test_what_is_not_built_is_said_with_the_option(tmp_path):
    said = in_words(repository(tmp_path))
    assert said.startswith("fastertransformer, tensorrt_llm (not built: ") and "tensorrt_llm_tokens" in said
    assert said.endswith("see tridecode build-repo --contract)")
    (tmp_path / "odd" / "1").mkdir(parents=True)
    (tmp_path / "odd" / "1" / "model.py").write_bytes(b"\xff" * 10_000)
    assert in_words(tmp_path) == said


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("tensorrt_llm", "--contract tensorrt_llm_tokens"),
        ("tensorrt_llm_plain", "--contract tensorrt_llm_tokens --decoupled tensorrt_llm_tokens"),
        ("tensorrt_llm_bls", "--contract tensorrt_llm"),
        ("tensorrt_llm_bls_streaming", "--contract tensorrt_llm --plain-text"),
        ("tensorrt_llm_bls_unbatched", "--contract tensorrt_llm --unbatched-text"),
        ("ensemble", "--contract fastertransformer"),
    ],
)
def test_an_unknown_model_is_named_with_the_option_that_makes_it(model, option):
    assert option in options_for(model)
    told = with_advice(f"Request for unknown model: '{model}' is not found")
    assert f"is not found; tridecode build-repo {option}" in told or f" or {option}" in told


def test_other_errors_and_other_models_are_left_alone():
    for text in ("Request for unknown model: 'nosuch' is not found", "input x is missing"):
        assert with_advice(text) == text
