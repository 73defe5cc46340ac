"""Finds problems of a repository on the machine that will run it: settings, weights and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES, require_file
from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.base.file_digest import file_sha256
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config, with_folders
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.configuration.engine_instances import InstanceGroup, num_engines, read_groups
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.configuration.rank_gpus import Demand, engine_gpus
from tridecode.backend.engine.device.parts.table import background_kinds
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.reader import MANIFEST_FILE, ManifestFile, WeightReader
from tridecode.converters.progress import byte_progress
from tridecode.model_repo_templates.pbtxt import parse_model_config, string_parameters
from tridecode.tools.checks.findings import Finding
from tridecode.tools.checks.repository import MAX_CONFIG_BYTES, MAX_MODELS, UNREADABLE, check_repo
from tridecode.tools.doctor.fit import Fit, Place, fit, fit_findings
from tridecode.tools.doctor.machine import Machine

_SAMPLED_FILES, _SAMPLED_BYTES = 16, 512 << 20
_MAX_PROBLEMS = 50  # limit of findings about damaged files
_LARGEST_FRACTION = 0.95  # a larger memory_fraction leaves no room for libraries


@dataclass(frozen=True)
class Engine:
    """The engine's settings in a repository. where: its config.pbtxt. groups: its instances, one engine
    each."""

    where: str
    config: EngineConfig
    model: ModelConfig
    weights: Path
    groups: tuple[InstanceGroup, ...] = (InstanceGroup(),)

    @property
    def ranks(self) -> int:
        return self.config.tensor_para_size * self.config.pipeline_para_size


def read_engines(repository: Path) -> list[Engine]:
    """Return the engines that the models of a repository name, except unreadable ones, for which check_repo
    has findings.
    """
    names = set()
    for path in sorted(repository.glob("*/config.pbtxt"))[:MAX_MODELS]:
        try:
            text = require_file(path, MAX_CONFIG_BYTES).read_text(encoding="utf-8")
            names.add(string_parameters(parse_model_config(text, str(path))).get("engine_model", ""))
        except UNREADABLE:
            continue
    found = []
    for name in sorted(names - {""}):
        try:
            found.append(_read_engine(repository / name))
        except UNREADABLE:
            continue
    return found


def _read_engine(folder: Path) -> Engine:
    """Read the settings; kind and size of the untrusted files are checked first."""
    where = f"{folder.name}/config.pbtxt"
    require_file(folder / "config.pbtxt", MAX_CONFIG_BYTES)
    config = with_folders(read_engine_config(read_engine_parameters(str(folder)), where), folder)
    weights = Path(checkpoint_dir(str(folder)))
    require_file(weights / "config.ini", MAX_CONFIG_BYTES)
    if (weights / MANIFEST_FILE).exists():
        require_file(weights / MANIFEST_FILE, MAX_JSON_BYTES)
    return Engine(where, config, read_model_config(weights), weights, read_groups(folder))


def place_of(
    machine: Machine, config: EngineConfig, gpu_memory: int | None = None, gpus: int | None = None
) -> Place:
    """Return the device of the engine's ranks. gpu_memory, gpus: those of a hypothetical machine."""
    visible = machine.cuda.visible
    if gpu_memory is not None or gpus is not None:
        memory = gpu_memory or min((gpu.memory for gpu in visible), default=80 << 30)
        return Place("cuda", memory, gpus or max(len(visible), 1))
    if config.device != "cpu" and visible:
        least = min(visible, key=lambda gpu: gpu.memory)
        return Place("cuda", least.memory, len(visible), min(gpu.capability for gpu in visible))
    return Place("cpu", machine.memory_available)


def repository_findings(repository: Path, full: bool) -> Iterator[Finding]:
    """Return the findings of check_repo, and those on weight files (all or a sample) that differ from the
    manifest.
    """
    yield from check_repo(repository, checksums=full)
    for engine in read_engines(repository):
        yield from _background_findings(repository, engine)
    if full:
        return
    for engine in read_engines(repository):
        if engine.config.weights == "files":
            yield from _sampled(engine)


def _background_findings(repository: Path, engine: Engine) -> Iterator[Finding]:
    """Check the files of the features that work between steps."""
    config = with_folders(engine.config, (repository / engine.where).parent)
    for feature, run in background_kinds(config).items():
        try:
            run.check(engine.model, config)
        except TridecodeError as error:
            fix = f"Name the folder that the message wants, or set {feature.switch} to 0."
            yield Finding("error", engine.where, str(error), f"the files of {feature.name}", fix)


def _sampled(engine: Engine) -> Iterator[Finding]:
    """Check every byte of some files, and 4 KiB of each MiB of all files if the manifest has that digest."""
    try:
        reader = WeightReader(engine.weights, engine.model)
    except TridecodeError:
        return  # check_repo reports it
    where, fix = str(engine.weights), "Copy or build it again; `tridecode doctor --full` reads every byte."
    if reader.manifest is None:
        text = "Nothing shows that the files are intact; build the repository with this version."
        yield Finding("warning", where, "no manifest.json", "checksums of the weights", text)
        return
    problems = list(reader.sample_problems())
    for problem in problems[:_MAX_PROBLEMS]:
        yield Finding("error", where, problem, "the bytes that were written", fix)
    if problems:
        return
    files = sample([file for tensor in reader.manifest.tensors for file in tensor.files])
    with byte_progress("checking a sample of the weights", sum(file.bytes for file in files)) as progress:
        for file in files:
            found = file_sha256(engine.weights / file.name, progress)
            if found != file.sha256:
                text = f"{file.name} has SHA-256 {found}; manifest.json says {file.sha256}"
                yield Finding("error", where, text, "the bytes that were written", fix)


def sample(files: list[ManifestFile]) -> list[ManifestFile]:
    """Return evenly spaced files with the first and the last, at most 16 files and 512 MiB."""
    count = min(_SAMPLED_FILES, len(files))
    chosen = [files[index * (len(files) - 1) // max(count - 1, 1)] for index in range(count)]
    total = 0
    kept: list[ManifestFile] = []
    for file in chosen:
        total += file.bytes
        if not kept or total <= _SAMPLED_BYTES:
            kept.append(file)
    return kept


def engine_findings(engine: Engine, machine: Machine, place: Place) -> Iterator[Finding]:
    """Find settings that this machine, or a hypothetical one, cannot run."""
    config, where = engine.config, engine.where
    if config.device == "cuda" and place.kind == "cpu":
        yield Finding(
            "error", where, "device cuda on a machine without a GPU that torch can use", "auto or cpu",
            "Set device to auto, or see the findings about GPUs.",
        )  # fmt: skip
    if place.kind == "cuda":
        yield from _gpu_settings(engine, place)
    elif config.data_type != "fp32":
        yield Finding(
            "warning", where, f"data_type {config.data_type} on a CPU", "fp32",
            "Set data_type to fp32: 16-bit arithmetic is several times slower on most CPUs.",
        )  # fmt: skip
    if config.num_threads > machine.cpus:
        found = f"num_threads {config.num_threads} on {machine.cpus} CPUs"
        yield Finding("warning", where, found, "at most the CPUs", "Set num_threads to 0: torch chooses.")


def _gpu_settings(engine: Engine, place: Place) -> Iterator[Finding]:
    config, where = engine.config, engine.where
    try:
        gpus_of(engine, place)
    except ConfigError as error:
        yield Finding("error", where, str(error), "a GPU for each rank", "Change one of them.")
    if config.data_type == "bf16" and place.capability is not None and place.capability < 80:
        found = f"data_type bf16 on compute capability {place.capability // 10}.{place.capability % 10}"
        yield Finding("error", where, found, "8.0 or more for bf16", "Set data_type to fp16.")
    if config.data_type == "fp32":
        fix = "Set data_type to bf16 or fp16: half the memory, and the kernels are made for 16 bit."
        yield Finding("warning", where, "data_type fp32 on a GPU", "16 bit", fix)
    if config.memory_fraction > _LARGEST_FRACTION:
        fix = "Set memory_fraction to 0.9: libraries allocate memory next to the cache."
        yield Finding("warning", where, f"memory_fraction {config.memory_fraction:g}", "0.95 or less", fix)


def gpus_of(engine: Engine, place: Place) -> list[int]:
    """Return the GPUs of all engines of the model. Raises ConfigError if a rank has no GPU of its own."""
    config, engines, shown = engine.config, num_engines(engine.groups), f"the machine has {place.devices}"
    demand = Demand(config.tensor_para_size, config.pipeline_para_size, engines)
    found: list[int] = []
    for number in range(engines):
        gpus = engine_gpus(engine.groups, number, demand, config.devices, place.devices, shown)
        found += gpus or range(number * engine.ranks, (number + 1) * engine.ranks)
    return found


def sharing_findings(engines: Sequence[Engine], places: Sequence[Place]) -> Iterator[Finding]:
    """Find engines of several models that use the same GPUs."""
    owner: dict[int, str] = {}
    for engine, place in zip(engines, places):
        if place.kind != "cuda":
            continue
        try:
            gpus = gpus_of(engine, place)
        except ConfigError:
            continue  # reported by engine_findings
        shared = [gpu for gpu in gpus if gpu in owner]
        if shared:
            found = f"GPU {shared[0]}, which the engine of {owner[shared[0]]} takes too"
            fix = "Set the parameter devices of both, such as 0,1 and 2,3."
            yield Finding("warning", engine.where, found, "GPUs of its own for each engine", fix)
        for gpu in gpus:
            owner.setdefault(gpu, engine.where)


def engine_fit(engine: Engine, place: Place) -> tuple[Fit | None, list[Finding]]:
    """Return the engine's memory requirements and the findings about them."""
    place = replace(place, engines=max(num_engines(engine.groups), 1))
    try:
        found = fit(engine.model, engine.config, place)
        return found, list(fit_findings(engine.where, engine.model, engine.config, place, found))
    except TridecodeError as error:
        fix = "Correct the setting that it names."
        return None, [Finding("error", engine.where, str(error), "settings that the engine takes", fix)]
