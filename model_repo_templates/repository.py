"""Determines a repository's models and writes their files, except weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.door_parameters import nearest
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.doors.contracts.ensemble import ENSEMBLE, POSTPROCESSING, PREPROCESSING
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.health import HEALTH
from tridecode.backend.doors.contracts.interactive import (
    INTERACTIVE,
    INTERACTIVE_ENSEMBLE,
    INTERACTIVE_POSTPROCESSING,
    INTERACTIVE_PREPROCESSING,
)
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import (
    BETWEEN,
    TENSORRT_LLM_ENSEMBLE,
    TENSORRT_LLM_POSTPROCESSING,
    TENSORRT_LLM_PREPROCESSING,
    TENSORRT_LLM_TOKENS,
    TO_PREPROCESSING,
    TO_TOKENS,
)
from tridecode.backend.doors.contracts.tensorrt_llm_v05 import TENSORRT_LLM_V05
from tridecode.backend.doors.contracts.vllm import VLLM
from tridecode.model_repo_templates import render
from tridecode.model_repo_templates.contracts_in import options_for
from tridecode.model_repo_templates.pbtxt import parse_model_config
from tridecode.model_repo_templates.served import (
    DEFAULT,
    ENGINE_MODEL,
    SERVED,
    Choices,
    RepositoryModel,
    served_models,
)

#: relative to the repository, if it has that model (tokenizer_dir); inside a model, because Triton takes
#: every top-level folder for a model
TOKENIZER_DIR = "preprocessing/1/tokenizer"
#: of LoRA adapters, within the engine's model; Triton ignores folders that are not numbers there
ADAPTERS_DIR = "adapters"
#: folder of the draft model's weights and tokenizer, in the same folder
DRAFT_DIR = "draft"
HEALTH_MODEL = "tridecode_health"
STAND_IN = "absent"  # the template and the door of a placeholder
#: kind of model -> its tensors; also the name of the door's module in backend/doors, except for ensembles
CONTRACTS = {
    "fastertransformer": FASTERTRANSFORMER,
    "preprocessing": PREPROCESSING,
    "postprocessing": POSTPROCESSING,
    "ensemble": ENSEMBLE,
    "text": TENSORRT_LLM,
    "vllm": VLLM,
    "llmapi": LLMAPI,
    "text_v05": TENSORRT_LLM_V05,
    "token_model": TENSORRT_LLM_TOKENS,
    "tensorrt_llm_preprocessing": TENSORRT_LLM_PREPROCESSING,
    "tensorrt_llm_postprocessing": TENSORRT_LLM_POSTPROCESSING,
    "tensorrt_llm_ensemble": TENSORRT_LLM_ENSEMBLE,
    "interactive": INTERACTIVE,
    "interactive_preprocessing": INTERACTIVE_PREPROCESSING,
    "interactive_postprocessing": INTERACTIVE_POSTPROCESSING,
    "interactive_ensemble": INTERACTIVE_ENSEMBLE,
    "health": HEALTH,
}


def repository_models(
    ensemble_owner: str = "",
    decoupled_fastertransformer: bool = False,
    plain_text: bool = False,
    unbatched_text: bool = False,
    *,
    contracts: Sequence[str] = DEFAULT,
    owners: Sequence[str] = (),
    decoupled: Sequence[str] = (),
    exclude_input: bool = False,
    uint32_text_inputs: bool = False,
    wrap_token_ids: bool = False,
    vllm_model: str = "vllm_model",
    stand_ins: bool = False,
    has_tokenizer: bool = True,
) -> list[RepositoryModel]:
    """The models of a repository.

    A model sends either one response or a stream (decoupled), so most contracts have two models: one with
    the usual name, and one for the other kind of client with the suffix _streaming or _plain.
    contracts: which ones are served, keys of SERVED. owners: if several contracts have a name, the first
    owner that has it keeps it. ensemble_owner: takes precedence for `ensemble`; the text models are
    tensorrt_llm_bls, and also `ensemble` if that contract owns the name. decoupled: contracts whose usual
    names stream; decoupled_fastertransformer: this one. plain_text: the text model's usual name does not.
    unbatched_text: also plain text models, with the suffix _unbatched, whose shapes have no batch axis
    (LiteLLM's /infer sends [1] instead of [1, 1]). exclude_input: by default the text models' answers do not
    begin with the prompt. uint32_text_inputs: UINT32_TEXT_INPUTS are UINT32 instead of INT32. wrap_token_ids:
    tensorrt_llm takes ids beyond the vocabulary modulo its size. vllm_model: name of the model with vLLM's
    contract. stand_ins: also a placeholder for each model name of the other contracts, which answers every
        request with the option that builds it. has_tokenizer: False leaves only the models of token ids and
    the
        probe. Raises ConfigError.
    """
    streaming = {*decoupled, *(["fastertransformer"] if decoupled_fastertransformer else [])}
    choices = Choices(
        frozenset(streaming),
        plain_text,
        unbatched_text,
        exclude_input,
        uint32_text_inputs,
        wrap_token_ids,
        vllm_model,
    )
    models = served_models(contracts, choices, owners, ensemble_owner)
    models.append(RepositoryModel(HEALTH_MODEL, "health", {"batched": False}, needs_text=False))
    models = [model for model in models if has_tokenizer or not model.needs_text]
    return models + (_stand_ins(contracts, choices, {model.name for model in models}) if stand_ins else [])


def _stand_ins(contracts: Sequence[str], choices: Choices, taken: set[str]) -> list[RepositoryModel]:
    """Return a placeholder for each model name of the contracts that are not served, one per name."""
    made: dict[str, RepositoryModel] = {}
    for contract in SERVED:
        for model in SERVED[contract].models(choices) if contract not in contracts else []:
            if model.name not in taken and model.name not in made:
                values = {
                    "decoupled": model.values.get("decoupled", "false"),
                    "batched": model.values.get("batched", True),
                    "contract_of": model.template,
                    "made_by": " or ".join(options_for(model.name)) or f"--contract {contract}",
                }
                made[model.name] = RepositoryModel(model.name, STAND_IN, values)
    return list(made.values())


def tokenizer_dir(models: Sequence[RepositoryModel]) -> str:
    """Return the tokenizer's path, relative to a repository of these models."""
    names = {model.name for model in models if model.template != STAND_IN}
    return TOKENIZER_DIR if "preprocessing" in names else f"{ENGINE_MODEL}/1/tokenizer"


def engine_texts(settings: Mapping[str, object], where: str) -> dict[str, str]:
    """The text of every engine parameter: `settings`, else EngineConfig's defaults; "auto" for None.

    Raises ConfigError for an unknown key or a value that EngineConfig refuses.
    """
    known = [field for field in fields(EngineConfig) if field.name != "extra"]
    unknown = sorted(set(settings) - {field.name for field in known})
    if unknown:
        meant = nearest(unknown[0], (field.name for field in known))
        hint = f"did you mean {meant}? " if meant else ""
        there = ", ".join(field.name for field in known)
        raise ConfigError(f"{where}: no parameter {unknown[0]}; {hint}there are {there}")
    texts = {field.name: _text(settings.get(field.name, field.default)) for field in known}
    read_engine_config(texts, where)
    return texts


def _text(value: object) -> str:
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_models(directory: Path, models: list[RepositoryModel], **values: object) -> None:
    """Write every model's config.pbtxt and version folder into `directory`.

    values: engine (engine_texts), model_type, checkpoint_path, stop_ids.
    """
    where = tokenizer_dir(models)
    for model in models:
        folder = directory / model.name
        text = render(
            f"{model.template}.pbtxt",
            name=model.name,
            contract=CONTRACTS[str(model.values.get("contract_of", model.template))],
            to_preprocessing=TO_PREPROCESSING,
            between=BETWEEN,
            to_tokens=TO_TOKENS,
            engine_model=ENGINE_MODEL,
            tokenizer_dir=where,
            **{"decoupled": "false", "batched": True, "uint32_inputs": (), **values, **model.values},
            **model.steps,
        )
        parse_model_config(text, f"{model.name}/config.pbtxt")
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        if model.template.endswith("ensemble"):
            (version / ".keep").touch()  # Triton wants the folder, and archives drop empty ones
        else:
            text = render("model.py", door=model.template)
            (version / "model.py").write_text(text, encoding="utf-8")
