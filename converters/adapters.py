"""LoRA adapters at conversion: writes lora_targets.json for adapters served by name, or merges one.

Both are derived from the family's rules, see converters/output_layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Module

from tridecode.backend.base.checkpoint_files import require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.weights.lora import (
    PICKLE_FILE,
    TARGETS_FILE,
    TARGETS_FORMAT,
    TENSOR_FILE,
    LoraConfig,
    LoraTarget,
    LoraTargets,
    read_lora_config,
    unmatched_note,
)
from tridecode.backend.weights.lora_tensors import LoraPair, pair_tensors
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.families import family_of
from tridecode.converters.output_layout import OutputLayout, Runs, output_layout
from tridecode.converters.rules import Conversion
from tridecode.converters.sources import Checkpoint, TensorSource
from tridecode.converters.sources.tensor_files import PickleSource, SafetensorsSource

_Shapes = Mapping[str, tuple[int, ...]]

# ---------------------------------------------------------------- lora_targets.json


def layouts(planned: PlannedConversion) -> dict[str, tuple[Conversion, OutputLayout]]:
    """The matrices of the layers that adapters can change, by the stems of their files."""
    held = planned.checkpoint.tensors.shapes
    found: dict[str, tuple[Conversion, OutputLayout]] = {}
    known: dict[object, OutputLayout | None] = {}  # the layers are alike
    for conversion in planned.conversions:
        spec = conversion.spec
        shapes = [tuple(held[planned.names[name]]) for name in conversion.sources]
        is_matrix = spec.layer is not None and len(spec.shape) == 2 and spec.name.endswith(".weight")
        if not is_matrix or any(len(shape) != 2 for shape in shapes):
            continue
        key = (*_identity(conversion.transform), spec.shape, *shapes)
        if key not in known:
            known[key] = output_layout(conversion, shapes)
        layout = known[key]
        if layout is not None and all(name.endswith(".weight") for name in conversion.sources):
            found[spec.name.removesuffix(".weight")] = conversion, layout
    return found


def _identity(transform: Callable[..., Tensor]) -> tuple:
    """Return a key that is equal for equivalent transforms."""
    if isinstance(transform, partial):
        return transform.func, transform.args, *sorted(transform.keywords.items())
    return (transform,)


def lora_targets(planned: PlannedConversion) -> LoraTargets:
    """Return lora_targets.json of a conversion."""
    held = planned.checkpoint.tensors.shapes
    numbers: dict[Runs, int] = {}
    targets = []
    for name, (conversion, layout) in layouts(planned).items():
        axis = 1 if layout.conv1d else 0
        outputs = [int(held[planned.names[source]][axis]) for source in conversion.sources]
        modules = [source.removesuffix(".weight") for source in conversion.sources]
        number = numbers.setdefault(layout.runs, len(numbers))
        targets.append(LoraTarget(name, conversion.spec.shape[0], modules, outputs, number))
    return LoraTargets(TARGETS_FORMAT, _prefix(planned.checkpoint), [list(runs) for runs in numbers], targets)


def _prefix(checkpoint: Checkpoint) -> str:
    """The prefix of a full model's tensors, which an adapter of the bare model lacks."""
    return family_of(checkpoint.config.model_type, checkpoint.path).prefix


def write_targets(directory: Path, planned: PlannedConversion) -> None:
    """Write lora_targets.json into a weight directory; not for a source without the modules' names."""
    if planned.checkpoint.plan is not None:
        return
    data = msgspec.json.encode(lora_targets(planned))
    (Path(directory) / TARGETS_FILE).write_bytes(data)


# ---------------------------------------------------------------- merging


def open_adapter(directory: Path) -> tuple[LoraConfig, TensorSource, dict[str, LoraPair]]:
    """PEFT's adapter of a directory, in .safetensors or .bin, with no tensor read.

    Raises CheckpointError or UnsupportedError naming the file and what was found.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder; wanted an adapter as PEFT saves it")
    config = read_lora_config(directory)
    for name, source in ((TENSOR_FILE, SafetensorsSource), (PICKLE_FILE, PickleSource)):
        path = directory / name
        if path.exists():
            tensors: TensorSource = source([require_file(path)])
            pairs = pair_tensors(tensors.shapes, path)
            return config, tensors, pairs
    raise CheckpointError(f"{directory} has neither {TENSOR_FILE} nor {PICKLE_FILE}")


class MergedSource:
    """The tensors of a checkpoint with an adapter added, in float32 where it adds something."""

    def __init__(self, base: TensorSource, adapter: TensorSource, deltas: Mapping[str, _Delta]):
        self._base, self._adapter, self._deltas = base, adapter, deltas
        self.shapes = base.shapes

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._deltas else self._base.dtype(name)

    def read(self, name: str) -> Tensor:
        weight, delta = self._base.read(name), self._deltas.get(name)
        if delta is None:
            return weight
        return weight.float() + delta.make(self._adapter)


@dataclass(frozen=True)
class _Delta:
    """The delta that an adapter adds to one tensor of the checkpoint."""

    pair: LoraPair
    scale: float
    conv1d: bool

    def make(self, tensors: TensorSource) -> Tensor:
        """Return the delta in the layout of the checkpoint's tensor, float32.

        Source: PEFT's get_delta_weight.
        """
        delta = tensors.read(self.pair.b).float() @ tensors.read(self.pair.a).float()
        if not delta.isfinite().all():
            raise CheckpointError(f"{self.pair.a} and {self.pair.b} have a product that is not finite")
        return (delta.t() if self.conv1d else delta) * self.scale


def _merged_reference(base: Checkpoint, directory: Path, dtype: torch.dtype) -> Module:
    """Return the base's independent model with the adapter merged by PEFT or, without PEFT, by plain torch.

    Merged in float32 and rounded once, like the weights.
    """
    model = base.reference_model(torch.float32)
    if find_spec("peft") is not None:
        from peft import PeftModel  # optional: verifies the merge by a second implementation

        try:
            adapted: Any = PeftModel.from_pretrained(model, str(directory))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"PEFT cannot apply {directory} to the reference of {base.path}, so nothing shows that the "
                f"merge is right (--no-parity builds without): {error}"
            ) from None
        model = adapted.merge_and_unload()
    else:
        _add_deltas(model, directory)
    return model.to(dtype).eval()


@torch.no_grad()
def _add_deltas(model: Module, directory: Path) -> None:
    config, tensors, pairs = open_adapter(directory)
    for module, pair in pairs.items():
        changed: Any = model.get_submodule(module)
        delta = tensors.read(pair.b).float() @ tensors.read(pair.a).float()
        is_conv1d = type(changed).__name__ == "Conv1D"
        changed.weight += (delta.t() if is_conv1d else delta) * config.scale(module, pair.rank)


def merge(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """Return `checkpoint` with the adapter of `directory` merged into its weights as they are read.

    Raises CheckpointError or UnsupportedError that names module and sizes if the adapter belongs to another
    model or adapts other modules than linear layers of its blocks.
    """
    config, tensors, pairs = open_adapter(directory)
    if checkpoint.plan is not None:
        raise UnsupportedError(
            f"{checkpoint.path} does not have the names of the modules that {directory} adapts; merge it "
            "into the checkpoint that these weights were made from"
        )
    planned = plan_conversion(checkpoint)
    known = {
        source: layout.conv1d
        for conversion, layout in layouts(planned).values()
        for source in conversion.sources
    }
    without = config.check_modules(pairs, (source.removesuffix(".weight") for source in known))
    notes = [f"{directory}: {unmatched_note(without)}"] if without else []
    deltas = {}
    for module, pair in pairs.items():
        source = _source_of(module, _prefix(checkpoint), known, directory)
        own, conv1d = planned.names[source], known[source]
        wanted = (pair.inputs, pair.outputs) if conv1d else (pair.outputs, pair.inputs)
        if tuple(checkpoint.tensors.shapes[own]) != wanted:
            raise CheckpointError(
                f"{directory} is of another model: {module} has {pair.inputs} inputs and {pair.outputs} "
                f"outputs; {own} of {checkpoint.path} is {tuple(checkpoint.tensors.shapes[own])}"
            )
        deltas[own] = _Delta(pair, config.scale(module, pair.rank), conv1d)
    reference = partial(_merged_reference, checkpoint, Path(directory)) if checkpoint.has_reference else None
    return replace(
        checkpoint,
        tensors=MergedSource(checkpoint.tensors, tensors, deltas),
        reference=reference,
        fills_reference=False,  # PEFT merges into the base's, so that the two stay independent
        adapter=Path(directory),
        notes=checkpoint.notes + notes,
    )


def _source_of(module: str, prefix: str, known: Iterable[str], directory: Path) -> str:
    """Return the full name of a module's weight; the adapter may belong to the bare model."""
    for source in (f"{module}.weight", f"{prefix}{module}.weight"):
        if source in known:
            return source
    raise UnsupportedError(
        f"{directory} adapts {module[:200]}; wanted linear layers of the blocks, as "
        f"{next(iter(known), 'none').removesuffix('.weight')}"
    )
