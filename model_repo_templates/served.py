"""The contracts that a repository can serve: the models of each, and the owner of a name that several have.

A row of SERVED is one choice of `build-repo --contract`. Its models are named as their clients expect. Two
contracts may use one name, such as `ensemble`: the owner of the name keeps it, and the models of the other
contracts get the contract's name in front, `fastertransformer_ensemble`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tridecode.backend.base.errors import ConfigError

ENGINE_MODEL = "fastertransformer"
_FOLDER = re.compile(r"\w[\w.-]{0,100}", re.ASCII)
#: inputs of the text models that LangChain's client sends as UINT32
UINT32_TEXT_INPUTS = ("max_tokens", "top_k", "beam_width")
#: sequence slots of Triton's batcher
MAX_CONVERSATIONS = 64


@dataclass(frozen=True)
class RepositoryModel:
    """One model: its folder's name, its kind (a key of CONTRACTS), and its values for the template.

    base: the name without a sibling's suffix, "ensemble" for ensemble_streaming; contracts compete for it.
    steps: of an ensemble, the template's name of a step -> the model of the same contract. needs_text: it is
    left out of a repository without a tokenizer. yields: it is left out if another contract has the base,
    unless its own contract is named as the owner.
    """

    name: str
    template: str
    values: Mapping[str, object] = field(default_factory=dict)
    base: str = ""
    steps: Mapping[str, str] = field(default_factory=dict)
    needs_text: bool = True
    yields: bool = False

    @property
    def claim(self) -> str:
        return self.base or self.name


@dataclass(frozen=True)
class Choices:
    """Options of build-repo that change the models of a contract.

    decoupled: contracts whose usual names stream. The others are explained at repository_models.
    """

    decoupled: frozenset[str] = frozenset()
    plain_text: bool = False
    unbatched_text: bool = False
    exclude_input: bool = False
    uint32_text_inputs: bool = False
    wrap_token_ids: bool = False
    vllm_model: str = "vllm_model"


@dataclass(frozen=True)
class Served:
    """One contract. about: for the documentation and --help. models: all of them, by Choices."""

    about: str
    models: Callable[[Choices], list[RepositoryModel]]


def pair(name: str, template: str, decoupled: bool, **more) -> list[RepositoryModel]:
    """Return the model with the usual name, which streams if `decoupled`, and its sibling, which does the
    opposite.

    Triton refuses a plain infer on a decoupled model, and a stream from one that is not.
    """
    sibling = f"{name}_plain" if decoupled else f"{name}_streaming"
    values = more.pop("values", {})
    return [
        RepositoryModel(
            one, template, {**values, "decoupled": "true" if flag else "false"}, base=name, **more
        )
        for one, flag in ((name, decoupled), (sibling, not decoupled))
    ]


def _fastertransformer(choices: Choices) -> list[RepositoryModel]:
    streams = "fastertransformer" in choices.decoupled
    generators = pair(ENGINE_MODEL, "fastertransformer", streams, needs_text=False)
    ensembles = pair("ensemble", "ensemble", streams)
    unary = {"preprocessing": "preprocessing", "postprocessing": "postprocessing"}
    return [
        *generators,
        *(RepositoryModel(name, name) for name in unary),
        *(
            replace(ensemble, steps={**unary, "generator": generator.name})
            for ensemble, generator in zip(ensembles, generators)
        ),
    ]


def _tensorrt_llm(choices: Choices) -> list[RepositoryModel]:
    values = {
        **_excluded(choices),
        "uint32_inputs": UINT32_TEXT_INPUTS if choices.uint32_text_inputs else (),
    }
    models = []
    for name in ("tensorrt_llm_bls", "ensemble"):
        mine = pair(name, "text", not choices.plain_text, values=values, yields=name == "ensemble")
        if choices.unbatched_text:
            more = {**values, "decoupled": "false", "batched": False}
            mine.append(replace(mine[0], name=f"{name}_unbatched", values=more))
        models += mine
    return models


def _vllm(choices: Choices) -> list[RepositoryModel]:
    values = {"batched": False, **_excluded(choices)}
    return pair(choices.vllm_model, "vllm", True, values=values)


def _llmapi(choices: Choices) -> list[RepositoryModel]:
    values = {"batched": False, **_excluded(choices)}
    return pair("tensorrt_llm", "llmapi", "llmapi" in choices.decoupled, values=values)


def _excluded(choices: Choices) -> dict[str, str]:
    return {"exclude_input": "true" if choices.exclude_input else "false"}


def _tokens(choices: Choices) -> list[RepositoryModel]:
    streams = "tensorrt_llm_tokens" in choices.decoupled
    values = {
        "exclude_input": "true" if choices.exclude_input else "false",
        "wrap_token_ids": "true" if choices.wrap_token_ids else "false",
    }
    generators = pair("tensorrt_llm", "token_model", streams, values=values, needs_text=False)
    steps = {"preprocessing": "preprocessing", "postprocessing": "postprocessing"}
    return [
        *generators,
        *(RepositoryModel(name, f"tensorrt_llm_{name}") for name in steps),
        *(
            replace(ensemble, steps={**steps, "generator": generator.name})
            for ensemble, generator in zip(pair("ensemble", "tensorrt_llm_ensemble", streams), generators)
        ),
    ]


def _v05(choices: Choices) -> list[RepositoryModel]:
    values = {"exclude_input": "true" if choices.exclude_input else "false"}
    return pair("ensemble", "text_v05", not choices.plain_text, values=values)


def _interactive(choices: Choices) -> list[RepositoryModel]:
    streams = "interactive" in choices.decoupled
    values = {"max_conversations": MAX_CONVERSATIONS}
    generators = pair(ENGINE_MODEL, "interactive", streams, needs_text=False, values=values)
    steps = {"preprocessing": "preprocessing", "postprocessing": "postprocessing"}
    return [
        *generators,
        *(RepositoryModel(name, f"interactive_{name}") for name in steps),
        *(
            replace(ensemble, steps={**steps, "generator": generator.name})
            for ensemble, generator in zip(pair("ensemble", "interactive_ensemble", streams), generators)
        ),
    ]


#: name of --contract -> the contract
SERVED: dict[str, Served] = {
    "fastertransformer": Served("FasterTransformer's token ids, and its ensemble", _fastertransformer),
    "tensorrt_llm": Served("TensorRT-LLM's text models", _tensorrt_llm),
    "vllm": Served("vLLM's backend", _vllm),
    "llmapi": Served("TensorRT-LLM's LLM API", _llmapi),
    "tensorrt_llm_tokens": Served("TensorRT-LLM's token ids (INT32), and the ensemble around them", _tokens),
    "tensorrt_llm_v0.5": Served("TensorRT-LLM's ensemble of v0.5: UINT32, word lists required", _v05),
    "interactive": Served("FasterTransformer's conversations, by Triton's sequences", _interactive),
}
DEFAULT = ("fastertransformer", "tensorrt_llm")


@dataclass(frozen=True)
class Preset:
    """Options of build-repo for the clients of one server."""

    contracts: tuple[str, ...]
    ensemble_owner: str

    def options(self) -> str:
        return f"--contract {','.join(self.contracts)} --ensemble-owner {self.ensemble_owner}"


#: name of --for -> the options that it stands for
PRESETS = {
    "fastertransformer": Preset(DEFAULT, "fastertransformer"),
    "trtllm": Preset(("tensorrt_llm", "tensorrt_llm_tokens"), "tensorrt_llm"),
    "vllm": Preset(("vllm", "tensorrt_llm"), "tensorrt_llm"),
}


def served_models(
    contracts: Sequence[str], choices: Choices, owners: Sequence[str] = (), ensemble_owner: str = ""
) -> list[RepositoryModel]:
    """Return the models of these contracts and of the engine, all with different names.

    owners: if several contracts have a name, the first owner that has it keeps it; ensemble_owner: takes
    precedence for `ensemble`. Raises ConfigError for an unknown contract, an owner that is not chosen, or a
    name without an owner.
    """
    _check(contracts, choices, owners, ensemble_owner)
    made = {name: SERVED[name].models(choices) for name in dict.fromkeys(contracts)}
    if not any(model.name == ENGINE_MODEL for models in made.values() for model in models):
        # its config.pbtxt configures the engine
        engine = next(model for model in _fastertransformer(choices) if model.name == ENGINE_MODEL)
        made = {"the engine": [engine], **made}
    if ensemble_owner and not any(model.claim == "ensemble" for model in made[ensemble_owner]):
        raise ConfigError(f"ensemble_owner is {ensemble_owner}, which has no model ensemble")
    models: list[RepositoryModel] = []
    for contract, mine in made.items():
        names: dict[str, str] = {}
        for model in mine:
            first = [ensemble_owner] if model.claim == "ensemble" else []
            keeps = _keeper(model.claim, made, [*first, *owners])
            if keeps == contract:
                names[model.name] = model.name
            elif not model.yields:
                names[model.name] = f"{contract}_{model.name}"
        models += [_renamed(model, names) for model in mine if model.name in names]
    return models


def _check(contracts: Sequence[str], choices: Choices, owners: Sequence[str], ensemble_owner: str) -> None:
    if not contracts:
        raise ConfigError(f"no contract is named; wanted some of {', '.join(SERVED)}")
    for name in contracts:
        if name not in SERVED:
            raise ConfigError(f"there is no contract {name!r}; wanted some of {', '.join(SERVED)}")
    if not _FOLDER.fullmatch(choices.vllm_model):
        raise ConfigError(
            f"vllm_model is {choices.vllm_model!r}; wanted a folder's name: letters, digits, _ . -"
        )
    options = (("owner", owners), ("ensemble_owner", [ensemble_owner]), ("decoupled", choices.decoupled))
    for option, names in options:
        for name in names:
            if name and name not in contracts:
                raise ConfigError(f"{option} is {name!r}; wanted one of {', '.join(contracts)}")


def _keeper(base: str, made: Mapping[str, list[RepositoryModel]], owners: Sequence[str]) -> str:
    """Return the contract that keeps the name `base`. owners: the preferred contracts, in order."""
    have = {
        contract: all(model.yields for model in models if model.claim == base)
        for contract, models in made.items()
        if any(model.claim == base for model in models)
    }
    for owner in owners:
        if owner in have:
            return owner
    firm = [contract for contract, yields in have.items() if not yields]
    if len(firm) > 1:
        both = f"the contracts {firm[0]} and {firm[1]} both have a model {base}"
        options = " or ".join(f"--owner {contract}" for contract in firm)
        wanted = f"wanted {options}, which keeps the name, or one of them"
        raise ConfigError(f"{both}; {wanted}. The other contract's becomes {firm[1]}_{base}, or the like")
    return firm[0] if firm else next(iter(have))


def _renamed(model: RepositoryModel, names: Mapping[str, str]) -> RepositoryModel:
    steps = {step: names[name] for step, name in model.steps.items()}
    return replace(model, name=names[model.name], steps=steps)
