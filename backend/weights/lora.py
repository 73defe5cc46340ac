"""LoRA adapters: their names, PEFT's adapter_config.json, and lora_targets.json. No torch.

An adapter is a directory as PEFT saves it. Its tensors belong to modules of the source checkpoint;
lora_targets.json, which the converter writes next to the weights, maps the outputs of each module to the
outputs of our matrices. docs/guides/adapters.md has both formats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tridecode.backend.base.errors import CheckpointError, RequestError, UnsupportedError
from tridecode.backend.wire.messages import MAX_LORA_NAME

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
TARGETS_FILE = "lora_targets.json"
#: changes with the meaning of lora_targets.json
TARGETS_FORMAT = "tridecode-lora-targets-1"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_TARGETS_BYTES = 64 << 20
_MAX_RANK = 1 << 16
#: keys without an effect when an adapter is applied
_HARMLESS = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "eva_config"),
}
#: initialisations that leave the base weights unchanged; the others change them when PEFT loads the adapter
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_name(name: str) -> None:
    """Raise RequestError unless `name` is a folder name that cannot lead out of its parent."""
    if len(name) > MAX_LORA_NAME or not _NAME.fullmatch(name):
        shown = repr(name if len(name) <= 60 else name[:57] + "...")
        wanted = f"at most {MAX_LORA_NAME} letters, digits and _ - . that do not begin with - or ."
        raise RequestError(f"lora_name is {shown}; wanted {wanted}")


# ---------------------------------------------------------------- adapter_config.json


@dataclass(frozen=True)
class LoraConfig:
    """The settings of PEFT's adapter_config.json that concern tensors. where: the file, for errors.

    targets: names, or suffixes of names, of the adapted modules; None: given as a pattern, which is not used.
    excludes: whether exclude_modules excludes some of them.
    """

    where: Path
    alpha: float
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None
    excludes: bool = False

    def scale(self, module: str, rank: int) -> float:
        """The factor of B @ A for a module. Source: peft.tuners.lora.layer, update_layer."""
        found = (alpha for key, alpha in self.alpha_pattern.items() if _matches(key, module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def check_modules(self, modules: Iterable[str], of_model: Iterable[str] = ()) -> list[str]:
        """Compare target_modules with the modules that have tensors; return the names of target_modules
        without a match.

        of_model: modules of the base model. PEFT requires only one match for the whole list, and tools write
        one list for several families. Raises CheckpointError for a module with tensors that the list lacks,
        and for a module of the model without tensors.
        """
        if self.targets is None:
            return []
        modules, of_model = list(modules), list(of_model)
        without = []
        for module in modules:
            if not any(_ends_with(module, target) for target in self.targets):
                raise CheckpointError(
                    f"{self.where}: target_modules does not have {module}, for which there are tensors"
                )
        for target in self.targets:
            if any(_ends_with(module, target) for module in modules):
                continue
            if not self.excludes and any(_ends_with(module, target) for module in of_model):
                raise CheckpointError(
                    f"{self.where}: target_modules has {target[:200]}, which the model has, but there are no "
                    "tensors for it"
                )
            without.append(target)
        return without


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _matches(pattern: str, module: str) -> bool:
    """Apply PEFT's rule: the pattern, after any prefix that ends with a dot, must match the whole name."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def read_lora_config(directory: Path) -> LoraConfig:
    """adapter_config.json of an adapter's directory.

    Raises CheckpointError for a damaged file, UnsupportedError that names a kind of adapter or a setting that
    this version does not apply.
    """
    path = Path(directory) / CONFIG_FILE
    raw = _read_object(path)
    if raw.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{path} has peft_type {_short(raw.get('peft_type'))}; this version reads LORA"
        )
    for key, value in raw.items():
        if key == "bias" and value in ("none", None):
            continue
        if key == "init_lora_weights":
            if value not in _PLAIN_INITIALISATIONS:
                raise UnsupportedError(
                    f"{path} has {key} = {_short(value)}, which changes the base weights; save the adapter "
                    "with PEFT's path_initial_model_for_weight_conversion"
                )
        elif value and key not in _HARMLESS:
            raise UnsupportedError(f"{path} has {key} = {_short(value)}, which this version does not apply")
    rank = _number(path, "r", raw.get("r"))
    if rank > _MAX_RANK or rank != int(rank):
        raise CheckpointError(f"{path} has r = {_short(raw.get('r'))}; wanted a rank of 1 to {_MAX_RANK:,}")
    return LoraConfig(
        path,
        _number(path, "lora_alpha", raw.get("lora_alpha")),
        bool(raw.get("use_rslora")),
        _alpha_pattern(path, raw.get("alpha_pattern")),
        _target_names(path, raw.get("target_modules")),
        bool(raw.get("exclude_modules")),
    )


def unmatched_note(targets: Iterable[str]) -> str:
    """Return a sentence about names of target_modules that match nothing; "" if all match."""
    names = [_short(target) for target in targets]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    shown = ", ".join(names[:8])
    return f"target_modules without a match in this model: {shown}{more}" if names else ""


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise CheckpointError(f"{path} has {key} = {_short(value)}; wanted a number above 0")
    return float(value)


def _alpha_pattern(path: Path, found: Any) -> dict[str, float]:
    if not found:
        return {}
    if not isinstance(found, dict) or len(found) > 10_000:
        raise CheckpointError(f"{path} has alpha_pattern = {_short(found)}; wanted an object")
    for pattern in found:
        # patterns come from a file: one that could take exponential time is not run
        if len(pattern) > 200 or re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 2:
            raise UnsupportedError(
                f"{path} has the alpha_pattern {_short(pattern)}; this version takes names of modules, and "
                "patterns with at most two repetitions, none of them of a group"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{path} has the alpha_pattern {_short(pattern)}: {error}") from None
    return {pattern: _number(path, f"alpha_pattern of {pattern}", found[pattern]) for pattern in found}


def _target_names(path: Path, found: Any) -> tuple[str, ...] | None:
    """Return target_modules if it is a list, for comparison with the tensors' modules; a pattern is not
    run.
    """
    if isinstance(found, str) or found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found) or len(found) > 10_000:
        raise CheckpointError(f"{path} has target_modules = {_short(found)}; wanted names of modules")
    return tuple(found)


def _read_object(path: Path) -> dict[str, Any]:
    found = _read(path, _MAX_CONFIG_BYTES)
    try:
        value = msgspec.json.decode(found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; wanted an object")
    return value


def _read(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or is not a file")
        with open(path, "rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(found) > most:
        raise CheckpointError(f"{path} is longer than {most:,} bytes")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------- lora_targets.json


class LoraTarget(msgspec.Struct, frozen=True):
    """One of our matrices, made of the outputs of one or more source modules. name: stem of its file, such as
    "model.layers.0.attention.query_key_value". inputs: number for the matrix and each module. outputs: number
    for each module. layout: index of LoraTargets.layouts.
    """

    name: str
    inputs: int
    modules: list[str]
    outputs: list[int]
    layout: int


class LoraTargets(msgspec.Struct, frozen=True):
    """lora_targets.json. prefix: prefix of the modules' names, which adapters of the bare model lack.

    layouts: each lists the outputs of a matrix in order, as runs (module, first, count): `count` outputs of
    the module of that index, from its output `first`; module -1: outputs without a module.
    """

    format: str
    prefix: str
    layouts: list[list[tuple[int, int, int]]]
    targets: list[LoraTarget]

    def by_module(self) -> dict[str, list[tuple[LoraTarget, int]]]:
        """Map each module to the targets that it is part of, each with its index among their modules."""
        found: dict[str, list[tuple[LoraTarget, int]]] = {}
        for target in self.targets:
            for index, module in enumerate(target.modules):
                found.setdefault(module, []).append((target, index))
        return found

    def most_bytes(self, rank: int) -> int:
        """Return the float32 bytes of an adapter's tensors if every module has this rank."""
        modules = {
            module: target.inputs + outputs
            for target in self.targets
            for module, outputs in zip(target.modules, target.outputs)
        }
        return 4 * rank * sum(modules.values())


def read_targets(directory: Path) -> LoraTargets:
    """lora_targets.json of a weight directory. CheckpointError if it is missing or damaged."""
    path = Path(directory) / TARGETS_FILE
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing: adapters need it; build the repository from the checkpoint of transformers"
        )
    try:
        targets = msgspec.json.decode(_read(path, _MAX_TARGETS_BYTES), type=LoraTargets)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid: {error}") from None
    if targets.format != TARGETS_FORMAT:
        raise CheckpointError(f"{path} has format {targets.format!r}; this version reads {TARGETS_FORMAT!r}")
    for target in targets.targets:
        _check_target(path, target, targets.layouts)
    return targets


def _check_target(path: Path, target: LoraTarget, layouts: list[list[tuple[int, int, int]]]) -> None:
    fits = len(target.modules) == len(target.outputs) and 0 <= target.layout < len(layouts)
    fits = fits and 0 < target.inputs < 1 << 31 and all(0 < count < 1 << 31 for count in target.outputs)
    if fits:
        for module, first, count in layouts[target.layout]:
            limit = 1 << 31 if module == -1 else 0
            if 0 <= module < len(target.outputs):
                limit = target.outputs[module]
            fits = fits and first >= 0 and count > 0 and first + count <= limit
    if not fits:
        raise CheckpointError(f"{path}: the layout of {target.name} does not fit its modules")
