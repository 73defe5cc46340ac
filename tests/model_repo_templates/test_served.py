"""The models of each `--contract`, and the owner of a name that two contracts have."""

from __future__ import annotations

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.model_repo_templates import served
from tridecode.model_repo_templates.repository import repository_models, tokenizer_dir
from tridecode.model_repo_templates.served import RepositoryModel, Served, pair


def names(**options) -> set[str]:
    return {model.name for model in repository_models(**options)}


@pytest.fixture
def rival(monkeypatch):
    """A contract whose models `preprocessing` and `ensemble` FasterTransformer has, too."""

    def models(choices):
        step = {"preprocessing": "preprocessing"}
        ensembles = pair("ensemble", "ensemble", "rival" in choices.decoupled, steps=step)
        return [RepositoryModel("preprocessing", "preprocessing"), *ensembles]

    monkeypatch.setitem(served.SERVED, "rival", Served("", models))


def test_one_contract_has_its_models_the_engine_and_the_probe():
    text = {"tensorrt_llm_bls", "tensorrt_llm_bls_plain", "ensemble", "ensemble_plain"}
    assert names(contracts=["tensorrt_llm"]) == {"fastertransformer", "tridecode_health"} | text
    assert "tensorrt_llm_bls" not in names(contracts=["fastertransformer"])
    assert names(contracts=["tensorrt_llm"], has_tokenizer=False) == {"fastertransformer", "tridecode_health"}


def test_the_tokenizer_is_in_a_model_that_exists():
    assert tokenizer_dir(repository_models()) == "preprocessing/1/tokenizer"
    alone = repository_models(contracts=["tensorrt_llm"])
    assert tokenizer_dir(alone) == "fastertransformer/1/tokenizer"


def test_two_contracts_with_one_name_are_refused_with_the_options_that_resolve_it(rival):
    both = ["fastertransformer", "rival"]
    with pytest.raises(ConfigError) as refused:
        repository_models(contracts=both)
    assert "the contracts fastertransformer and rival both have a model preprocessing" in str(refused.value)
    for option in ("--owner fastertransformer", "--owner rival"):
        assert option in str(refused.value)


def test_the_owner_keeps_the_names_and_the_steps_of_the_other_follow(rival):
    models = {
        m.name: m for m in repository_models(contracts=["fastertransformer", "rival"], owners=["rival"])
    }
    assert models["ensemble"].steps == {"preprocessing": "preprocessing"}
    assert models["fastertransformer_ensemble"].steps == {
        "preprocessing": "fastertransformer_preprocessing",
        "postprocessing": "postprocessing",
        "generator": "fastertransformer",
    }
    assert {"fastertransformer_ensemble_streaming", "ensemble_streaming"} <= set(models)


def test_every_contract_can_be_served_beside_the_others():
    found = names(contracts=list(served.SERVED), owners=list(served.SERVED))
    assert len(found) == len(repository_models(contracts=list(served.SERVED), owners=list(served.SERVED)))
    assert {"ensemble", "tensorrt_llm_v0.5_ensemble", "tensorrt_llm_tokens_preprocessing"} <= found


def test_stand_ins_have_the_names_and_inputs_of_the_contracts_that_are_not_built():
    built = {model.name: model for model in repository_models(stand_ins=True)}
    usual = names()
    assert {name for name, model in built.items() if model.template != "absent"} == usual
    stand_in = built["tensorrt_llm"]
    assert "--contract tensorrt_llm_tokens" in str(stand_in.values["made_by"])
    assert {"tensorrt_llm_streaming", "ensemble_plain", "vllm_model"} <= set(built) - usual
    alone = repository_models(contracts=["tensorrt_llm"], stand_ins=True)
    assert "preprocessing" in {model.name for model in alone}
    assert tokenizer_dir(alone) == "fastertransformer/1/tokenizer"


def test_a_contract_streams_under_its_usual_names_if_told_so(rival):
    streaming = names(contracts=["rival"], decoupled=["rival"])
    assert {"ensemble", "ensemble_plain"} <= streaming and "ensemble_streaming" not in streaming


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"contracts": ["vlm"]},
            "there is no contract 'vlm'; wanted some of fastertransformer",
        ),
        ({"contracts": []}, "no contract is named; wanted some of fastertransformer"),
        (
            {"contracts": ["tensorrt_llm"], "owners": ["fastertransformer"]},
            "owner is 'fastertransformer'",
        ),
        ({"decoupled": ["vllm"]}, "decoupled is 'vllm'; wanted one of fastertransformer, tensorrt_llm"),
    ],
)
def test_a_contract_that_does_not_exist_or_is_not_chosen_is_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        repository_models(**options)
