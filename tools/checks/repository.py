"""Finds faults in a model repository. It reads files, which are not trusted, and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonConfig

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES, require_file
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir
from tridecode.backend.configuration.model_config import ModelConfig, check_stages, check_tensor_size
from tridecode.backend.models import check_context, read_model_config
from tridecode.backend.weights.reader import MANIFEST_FILE, WeightReader
from tridecode.converters.progress import byte_progress
from tridecode.converters.tokenizers.vocabulary import vocabulary_size
from tridecode.model_repo_templates.pbtxt import data_type_name, parse_model_config, string_parameters
from tridecode.tools.checks import parameter_names
from tridecode.tools.checks.draft import draft_faults
from tridecode.tools.checks.findings import Finding, no_repository
from tridecode.tools.checks.instances import instance_faults
from tridecode.tools.checks.parity import parity_faults
from tridecode.tools.checks.sequences import sequence_faults

MAX_CONFIG_BYTES = 1 << 20  # config.pbtxt and config.ini; ours have 6 kB
MAX_MODELS = 1000
#: exceptions raised for damaged files, our own errors included
UNREADABLE = (TridecodeError, OSError, ValueError, ArithmeticError, RecursionError)


def check_repo(path: str | Path, checksums: bool = False) -> list[Finding]:
    """Return all faults of a model repository, errors first.

    checksums: also read every weight file and compare it with manifest.json.
    """
    repository = Path(path)
    if not repository.is_dir():
        return [no_repository(path)]
    models, findings = _read_models(repository)
    engines = {string_parameters(model).get("engine_model", "") for model in models.values()} - {""}
    for name, model in models.items():
        findings += _check_model(repository, name, model)
        for severity, was, wanted, advice in instance_faults(model, models, engines):
            findings.append(Finding(severity, f"{name}/config.pbtxt", was, wanted, advice))
        findings += _check_parameters(f"{name}/config.pbtxt", model, engines)
        if model.platform == "ensemble":
            findings += _check_ensemble(name, model, models)
    if not engines:
        findings.append(
            _error(str(path), "no model with a parameter engine_model", "one", "Build it with build-repo.")
        )
    for engine in sorted(engines):
        if engine in models:
            findings += _check_engine(repository, engine, models, checksums)
        else:
            where = ", ".join(name for name, model in models.items() if _names_engine(model, engine))
            findings.append(
                _error(
                    where, f"engine_model {engine}", "a model of this repository", "Correct the parameter."
                )
            )
    return sorted(findings, key=lambda finding: finding.severity)


def _error(where: str, found: str, wanted: str, fix: str) -> Finding:
    return Finding("error", where, found, wanted, fix)


def _warning(where: str, found: str, wanted: str, fix: str) -> Finding:
    return Finding("warning", where, found, wanted, fix)


def _names_engine(model: TritonConfig, engine: str) -> bool:
    return string_parameters(model).get("engine_model") == engine


# ---------------------------------------------------------------- each model's config.pbtxt


def _read_models(repository: Path) -> tuple[dict[str, TritonConfig], list[Finding]]:
    models, findings = {}, []
    folders = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) > MAX_MODELS:
        found = f"{len(folders):,} folders"
        findings.append(_error(str(repository), found, f"at most {MAX_MODELS:,}", "Is it a repository?"))
    for folder in folders[:MAX_MODELS]:
        where, path = f"{folder.name}/config.pbtxt", folder / "config.pbtxt"
        if not path.exists():
            fix = "Triton loads each folder as a model; move it."
            findings.append(_error(where, "no such file", "one in every folder", fix))
            continue
        try:
            text = require_file(path, MAX_CONFIG_BYTES).read_text(encoding="utf-8")
            models[folder.name] = parse_model_config(text, where)
        except UNREADABLE as error:
            findings.append(_error(where, str(error), "Triton's schema", "Correct the file."))
    return models, findings


def _check_model(repository: Path, name: str, model: TritonConfig) -> Iterator[Finding]:
    where = f"{name}/config.pbtxt"
    if model.name != name:
        yield _error(where, f"name {model.name!r}", f"{name!r}, its folder's", "Correct the name.")
    versions = [path for path in (repository / name).iterdir() if path.is_dir() and path.name.isdigit()]
    if not versions:
        yield _error(name, "no version folder", f"{name}/1", "Create it.")
    if model.backend == "python":
        for version in versions:
            if not (version / (model.default_model_filename or "model.py")).is_file():
                yield _error(
                    f"{name}/{version.name}", "no model.py", "model.py", "Build the repository again."
                )
        yield from _check_traps(where, model)


def _check_traps(where: str, model: TritonConfig) -> Iterator[Finding]:
    """Find settings that Triton accepts but that break or slow down these models."""
    decoupled = model.model_transaction_policy.decoupled
    if model.HasField("dynamic_batching"):
        yield _warning(
            where,
            "dynamic_batching",
            "none",
            "The engine forms its own batches; Triton's queue only adds delay, up to 0.5 s per request.",
        )
    for found, wanted, advice in sequence_faults(model):
        yield _error(where, found, wanted, advice)
    if model.response_cache.enable and decoupled:
        yield _error(
            where, "response_cache on a decoupled model", "one of them", "Triton refuses to load both."
        )
    for tensor in model.input:
        if tensor.allow_ragged_batch:
            yield _warning(
                where,
                f"input {tensor.name} with allow_ragged_batch",
                "none",
                "It has an effect with dynamic_batching only, which these models do not need.",
            )
    if model.name.endswith(("_streaming", "_plain")) and decoupled != model.name.endswith("_streaming"):
        found = f"decoupled {str(decoupled).lower()} in a model named {model.name}"
        fix = "Clients choose by the name; build the repository again, or rename it."
        yield _warning(where, found, "_streaming decoupled, _plain not", fix)


def _check_parameters(where: str, model: TritonConfig, engines: set[str]) -> Iterator[Finding]:
    """Find unknown parameters, with which a model does not load; only python models read any."""
    of_engine = model.name in engines
    if model.backend == "python":
        for key in parameter_names.unknown(string_parameters(model), of_engine):
            fix = parameter_names.advice(key, of_engine)
            yield _error(where, f"parameter {key}", "one that is known", fix)


# ---------------------------------------------------------------- ensembles


@dataclass(frozen=True)
class _Tensor:
    type: str
    dims: tuple[int, ...]
    optional: bool

    def __str__(self) -> str:
        return f"{self.type} [{', '.join(map(str, self.dims))}]"

    def fits(self, other: _Tensor) -> bool:
        if self.type != other.type or len(self.dims) != len(other.dims):
            return False
        return all(a == b or -1 in (a, b) for a, b in zip(self.dims, other.dims))


def _tensors(declared, model: TritonConfig) -> dict[str, _Tensor]:
    """Return the declared tensors with their batch axis, which some models of an ensemble declare
    themselves.
    """
    batch = (-1,) if model.max_batch_size > 0 else ()
    return {
        tensor.name: _Tensor(
            data_type_name(tensor.data_type),
            (*batch, *tensor.dims),
            bool(getattr(tensor, "optional", False)),
        )
        for tensor in declared
    }


def _check_ensemble(name: str, model: TritonConfig, models: dict[str, TritonConfig]) -> Iterator[Finding]:
    """Check every tensor from step to step: names, types, dims, and that required inputs exist."""
    where, fix = f"{name}/config.pbtxt", "Correct the ensemble or the step's model."
    known = _tensors(model.input, model)  # tensors that a step can use, after the steps before it
    for step in model.ensemble_scheduling.step:
        target = models.get(step.model_name)
        at = f"{where}, step {step.model_name}"
        if target is None:
            yield _error(at, "no such model", "a model of this repository", fix)
            return
        if target.model_transaction_policy.decoupled and not model.model_transaction_policy.decoupled:
            yield _error(at, "a decoupled step in an ensemble that is not", "both alike", fix)
        inputs, outputs = _tensors(target.input, target), _tensors(target.output, target)
        for key, value in step.input_map.items():
            if key not in inputs or value not in known:
                yield _error(
                    at, f"input_map {key} from {value}", "an input of the step from a known tensor", fix
                )
            elif not inputs[key].fits(known[value]):
                yield _error(
                    at, f"{value} {known[value]} into {key} {inputs[key]}", "one type and shape", fix
                )
            elif known[value].optional and not inputs[key].optional:
                yield _error(at, f"optional {value} into required {key}", "both alike", fix)
        for key, tensor in inputs.items():
            if key not in step.input_map and not tensor.optional:
                yield _error(at, f"no input_map for {key}", "one for each required input", fix)
        for key, value in step.output_map.items():
            if key not in outputs:
                yield _error(at, f"output_map {key}", "an output of the step", fix)
            else:
                known[value] = outputs[key]
    steps = [models[step.model_name] for step in model.ensemble_scheduling.step]
    if model.model_transaction_policy.decoupled and not any(
        step.model_transaction_policy.decoupled for step in steps
    ):
        yield _warning(where, "decoupled, with no step that is", "both alike", fix)
    for key, tensor in _tensors(model.output, model).items():
        if key not in known:
            yield _error(where, f"output {key} that no step makes", "an output_map to it", fix)
        elif not tensor.fits(known[key]):
            yield _error(where, f"output {key} {tensor} from {known[key]}", "one type and shape", fix)


# ---------------------------------------------------------------- engine, weights, tokenizer, parity


def _check_engine(
    repository: Path, name: str, models: dict[str, TritonConfig], checksums: bool
) -> Iterator[Finding]:
    where = f"{name}/config.pbtxt"
    try:
        texts = string_parameters(models[name])
        misspelt = parameter_names.unknown(texts, engine=True)  # reported as findings of their own
        engine = read_engine_config({key: texts[key] for key in texts if key not in misspelt}, where)
        weights = Path(checkpoint_dir(str(repository / name)))
        for file, limit in (("config.ini", MAX_CONFIG_BYTES), (MANIFEST_FILE, MAX_JSON_BYTES)):
            if (weights / file).exists():
                require_file(weights / file, limit)
        config = read_model_config(weights)
        reader = WeightReader(weights, config) if engine.weights == "files" else None
    except UNREADABLE as error:
        yield _error(
            where, str(error), "a configuration and weights that load", "Correct it, or build again."
        )
        return
    if reader is None:  # drawn when the engine starts
        yield _warning(where, f"weights {engine.weights}", "files", "Its answers are nonsense.")
    yield from _check_settings(where, engine, config)
    if checksums and reader is not None:
        total = sum(reader.file_bytes(spec) * len(reader.files(spec)) for spec in reader.specs.values())
        with byte_progress("checking weight files", total) as progress:
            for problem in reader.checksum_problems(progress):
                yield _error(str(weights), problem, "the bytes that were written", "Copy or build it again.")
    folders = {
        string_parameters(model).get("tokenizer_dir", "")
        for model in models.values()
        if _names_engine(model, name)
    }
    for folder in sorted(folders - {""}):
        yield from _check_tokenizer(repository, folder, config)
    served = repository / min(folders - {""}) if folders - {""} else None
    yield from draft_faults(repository / name, where, engine, config, served, checksums)
    if reader is not None:
        tokenizers: list[str | None] = [*sorted(folders - {""})]
        for compared in tokenizers or [None]:
            yield from parity_faults(repository, weights, compared)


def _check_settings(where: str, engine: EngineConfig, config: ModelConfig) -> Iterator[Finding]:
    try:
        check_tensor_size(config, engine.tensor_para_size)
    except TridecodeError as error:
        yield _error(where, str(error), "one that divides it", "Choose another tensor_para_size.")
    try:
        check_stages(config.num_layers, engine.pipeline_para_size, config.model_name)
    except TridecodeError as error:
        yield _error(where, str(error), "layers for every stage", "Choose another pipeline_para_size.")
    longest = engine.max_sequence_tokens or config.max_positions
    try:
        check_context(config, longest)
    except TridecodeError as error:
        yield _error(where, str(error), "a length that the model can compute", "Lower it, or auto.")
    else:
        if longest > config.max_positions:
            wanted = f"at most the model's {config.max_positions} positions"
            fix = "The model was not made for longer texts: its answers to them may be poor."
            yield _warning(where, f"max_sequence_tokens {longest}", wanted, fix)
    if config.weight_dtype == "bf16" and engine.data_type == "fp16":
        yield _warning(
            where, "data_type fp16 over bf16 weights", "bf16 or fp32", "Values beyond 65504 become infinite."
        )


def _check_tokenizer(repository: Path, folder: str, config: ModelConfig) -> Iterator[Finding]:
    path = repository / folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(require_file(path, MAX_JSON_BYTES)))
    except Exception as error:  # tokenizers raises nothing else
        yield _error(str(path), str(error), "a tokenizer.json that loads", "Build the repository again.")
        return
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        yield _error(
            str(path), "truncation or padding", "none", "Prompts would be cut or padded; remove both."
        )
    base, size = vocabulary_size(tokenizer, with_added_tokens=False), vocabulary_size(tokenizer)
    wanted = f"ids below the model's vocabulary size, {config.vocab_size}"
    if base > config.vocab_size:
        yield _error(str(path), f"ids up to {base - 1}", wanted, "Is it another model's?")
    elif size > config.vocab_size:
        yield _warning(str(path), f"added ids up to {size - 1}", wanted, "Prompts with these are refused.")
