"""Which models a repository has, and their files, except weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tridecode.backend.config import EngineConfig, read_engine_config
from tridecode.backend.doors.contracts.ensemble import ENSEMBLE, POSTPROCESSING, PREPROCESSING
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.health import HEALTH
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.errors import ConfigError
from tridecode.model_repo_templates import render
from tridecode.model_repo_templates.pbtxt import parse_model_config

ENGINE_MODEL = "fastertransformer"
#: relative to the repository; inside a model, because Triton takes every top-level folder for a model
TOKENIZER_DIR = "preprocessing/1/tokenizer"
#: of LoRA adapters, within the engine's model; Triton ignores folders that are not numbers there
ADAPTERS_DIR = "adapters"
HEALTH_MODEL = "tridecode_health"
#: kind of model -> its tensors; also the name of the door's module in backend/doors, except for the ensemble
CONTRACTS = {
    "fastertransformer": FASTERTRANSFORMER,
    "preprocessing": PREPROCESSING,
    "postprocessing": POSTPROCESSING,
    "ensemble": ENSEMBLE,
    "text": TENSORRT_LLM,
    "health": HEALTH,
}
#: inputs of the text models that LangChain's client sends as UINT32
UINT32_TEXT_INPUTS = ("max_tokens", "top_k", "beam_width")
ENSEMBLE_OWNERS = ("fastertransformer", "tensorrt_llm")


@dataclass(frozen=True)
class RepositoryModel:
    """One model: its folder's name, its kind (a key of CONTRACTS), and its values for the template."""

    name: str
    template: str
    values: Mapping[str, object]


def repository_models(
    ensemble_owner: str = "fastertransformer",
    decoupled_fastertransformer: bool = False,
    plain_text: bool = False,
    unbatched_text: bool = False,
    *,
    exclude_input: bool = False,
    uint32_text_inputs: bool = False,
    has_tokenizer: bool = True,
) -> list[RepositoryModel]:
    """The models of a repository.

    A model sends either one response or a stream (decoupled), so each contract has two models: one with the
    usual name, and one for the other kind of client with the suffix _streaming or _plain.
    ensemble_owner: the contract of the name `ensemble`, "fastertransformer" or "tensorrt_llm"; the text
    models are tensorrt_llm_bls in both cases, and also `ensemble` in the second.
    decoupled_fastertransformer: FasterTransformer's usual names stream. plain_text: the text model's usual
    name does not. unbatched_text: also plain text models, with the suffix _unbatched, whose shapes have no
    batch axis (LiteLLM's /infer sends [1] instead of [1, 1]). exclude_input: by default the text models'
    answers do not begin with the prompt. uint32_text_inputs: UINT32_TEXT_INPUTS are UINT32 instead of INT32.
    has_tokenizer: False leaves the models of token ids, and the probe.
    """
    if ensemble_owner not in ENSEMBLE_OWNERS:
        raise ConfigError(f"ensemble_owner is {ensemble_owner!r}; wanted one of {', '.join(ENSEMBLE_OWNERS)}")
    owns_ensemble = ensemble_owner == "fastertransformer"
    generators = _pair(ENGINE_MODEL, decoupled_fastertransformer)
    token_models = [
        RepositoryModel(name, "fastertransformer", {"decoupled": flag}) for name, flag in generators
    ]
    health = RepositoryModel(HEALTH_MODEL, "health", {"batched": False})
    if not has_tokenizer:
        return [*token_models, health]
    ensembles = _pair(
        "ensemble" if owns_ensemble else "fastertransformer_ensemble", decoupled_fastertransformer
    )
    texts = []
    for name in ("tensorrt_llm_bls",) if owns_ensemble else ("tensorrt_llm_bls", "ensemble"):
        texts += [(*each, True) for each in _pair(name, not plain_text)]
        if unbatched_text:
            texts.append((f"{name}_unbatched", "false", False))
    shared = {"exclude_input": "true" if exclude_input else "false"}
    uint32 = {"uint32_inputs": UINT32_TEXT_INPUTS if uint32_text_inputs else ()}
    return [
        *token_models,
        RepositoryModel("preprocessing", "preprocessing", {}),
        RepositoryModel("postprocessing", "postprocessing", {}),
        *(
            RepositoryModel(name, "ensemble", {"decoupled": flag, "generator": generator})
            for (name, flag), (generator, _) in zip(ensembles, generators)
        ),
        *(
            RepositoryModel(name, "text", {"decoupled": flag, "batched": batched, **shared, **uint32})
            for name, flag, batched in texts
        ),
        health,
    ]


def _pair(name: str, decoupled: bool) -> list[tuple[str, str]]:
    """The model of the usual name and its sibling, each with protobuf's true or false for decoupled."""
    if decoupled:
        return [(name, "true"), (f"{name}_plain", "false")]
    return [(name, "false"), (f"{name}_streaming", "true")]


def engine_texts(settings: Mapping[str, object], where: str) -> dict[str, str]:
    """The text of every engine parameter: `settings`, else EngineConfig's defaults; "auto" for None.

    Raises ConfigError for an unknown key or a value that EngineConfig refuses.
    """
    known = [field for field in fields(EngineConfig) if field.name != "extra"]
    unknown = sorted(set(settings) - {field.name for field in known})
    if unknown:
        raise ConfigError(
            f"{where}: no parameter {unknown[0]}; there are {', '.join(field.name for field in known)}"
        )
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
    for model in models:
        folder = directory / model.name
        text = render(
            f"{model.template}.pbtxt",
            name=model.name,
            contract=CONTRACTS[model.template],
            engine_model=ENGINE_MODEL,
            tokenizer_dir=TOKENIZER_DIR,
            **{"decoupled": "false", "batched": True, "uint32_inputs": (), **values, **model.values},
        )
        parse_model_config(text, f"{model.name}/config.pbtxt")
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        if model.template == "ensemble":
            (version / ".keep").touch()  # Triton wants the folder, and archives drop empty ones
        else:
            text = render("model.py", door=model.template)
            (version / "model.py").write_text(text, encoding="utf-8")
