"""Converts a checkpoint to a weight directory, by the rules of its family."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tridecode.backend import models
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.configuration.model_config import DTYPES, ModelConfig
from tridecode.backend.weights.manifest import Manifest, sample_sha256
from tridecode.backend.weights.quantization import Quantization, stored_specs
from tridecode.backend.weights.reader import FILE_DTYPES, TORCH_DTYPES
from tridecode.backend.wire.sampling_params import MAX_END_IDS
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.families import CheckpointFamily, family_of
from tridecode.converters.hf_config import context_note
from tridecode.converters.mapped_files import released_pages
from tridecode.converters.prompts import check_prompts, prompt_keys, write_prompts
from tridecode.converters.pruning.config import read_declared
from tridecode.converters.pruning.sizes import describe, rules_of_layers, with_layer_sizes
from tridecode.converters.quantized_writer import quantized_tensors
from tridecode.converters.references.pruned import model_of, unpruned_tensors
from tridecode.converters.rules import Conversion, expand, plan_conversions
from tridecode.converters.sources.quantized import QuantizedSource
from tridecode.converters.writer import TensorToWrite, write_weights
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest

_MAX_FILES = 10_000  # of a checkpoint


@dataclass(frozen=True)
class PlannedConversion:
    """A conversion that was checked against the checkpoint's names and shapes."""

    checkpoint: Checkpoint
    config: ModelConfig
    conversions: list[Conversion]
    names: dict[str, str]  # transformers' full name -> the checkpoint's own
    #: (name of a target, function that makes it dense) -> value to write instead: a QuantizedWeight for each
    #: tensor that config.quantization covers. None: these are rounded to nearest
    replaced: Callable[[str, Callable[[], torch.Tensor]], torch.Tensor | QuantizedWeight] | None = None
    #: errors of the values of `replaced`, if calibrated with texts: see quantize/calibrated.py,
    #: Calibrated.errors
    product_errors: Mapping[str, float] | None = None
    replaced_by: str = ""  # digest of these values; an interrupted conversion continues if it is the same

    @property
    def total_bytes(self) -> int:
        """Total size of the weight files in bytes."""
        specs = stored_specs([item.spec for item in self.conversions], self.config.quantization)
        dtype = self.config.weight_dtype
        return sum(math.prod(spec.shape) * FILE_DTYPES[spec.dtype or dtype].itemsize for spec in specs)

    @property
    def notes(self) -> list[str]:
        """Notes for the user: the context length if rope scaling extends it, and the layer sizes of a pruned
        model.
        """
        context = "" if self.checkpoint.plan is not None else self._context_note()
        return ([context] if context else []) + (describe(self.config) if self.config.layer_sizes else [])

    def _context_note(self) -> str:
        return context_note(self.checkpoint.config, self.config.max_positions)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint, by transformers' full name."""
        return self.checkpoint.tensors.read(self.names[name])

    def write(self, directory: Path, tensor_para_size: int = 1) -> Manifest:
        """Write the weight directory; see writer.write_weights."""
        tensors = [part for item in self.conversions for part in self._to_write(item)]
        files = checkpoint_files(self.checkpoint.path)
        prompts = self.checkpoint.prompts
        check_prompts(prompts, self.config)
        if self.checkpoint.adapter is not None:
            files += checkpoint_files(self.checkpoint.adapter)
        with released_pages(files):
            manifest = write_weights(
                directory,
                self.config,
                tensors,
                tensor_para_size,
                source_digest(files, self.replaced_by),
                prompt_keys(prompts, self.config, self.checkpoint.prompt_start_id),
            )
        write_prompts(directory, prompts, self.config, tensor_para_size)
        return manifest

    def _to_write(self, item: Conversion) -> list[TensorToWrite]:
        """The files of a tensor: one, or the parts of a quantised matrix."""
        quantization, memory = self.config.quantization, self._memory(item)
        dense = partial(item.make, self.read)
        if quantization is not None and quantization.covers(item.spec):
            load = partial(self._quantized, item.spec.name, quantization, dense)
            return quantized_tensors(item.spec, quantization, load, memory)
        return [TensorToWrite(item.spec, partial(self._dense, item.spec.name, dense), memory)]

    def _quantized(
        self, name: str, quantization: Quantization, dense: Callable[[], torch.Tensor]
    ) -> QuantizedWeight:
        if self.replaced is None:
            q = quantization
            return round_to_nearest(dense().t(), q.weights, q.group, q.activations, q.block_rows)
        weight = self.replaced(name, dense)
        assert isinstance(weight, QuantizedWeight), name
        return weight

    def _dense(self, name: str, dense: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.replaced is None:
            return dense()
        tensor = self.replaced(name, dense)
        assert isinstance(tensor, torch.Tensor), name
        return tensor

    def _memory(self, item: Conversion) -> int:
        """Return the bytes that a tensor takes while it is written, in the wider of the two dtypes."""
        stored = [self.checkpoint.tensors.dtype(self.names[name]).itemsize for name in item.sources]
        return math.prod(item.spec.shape) * max(*stored, TORCH_DTYPES[self.config.weight_dtype].itemsize)


def checkpoint_files(path: Path) -> list[Path]:
    """The files of a checkpoint: a file, or those of a directory and its folders."""
    if path.is_file():
        return [path]
    found = itertools.islice(path.rglob("*"), _MAX_FILES)
    return sorted(file for file in found if file.is_file() and ".git" not in file.parts)


def source_digest(files: list[Path], replaced_by: str = "") -> str:
    """Return a digest of names and contents (SampleDigest), to decide whether a conversion may continue."""
    digest = hashlib.sha256(replaced_by.encode())
    for file in files:
        digest.update(f"{file.name}\0{sample_sha256(file)}\n".encode())
    return digest.hexdigest()


def plan_conversion(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    model_name: str | None = None,
    quantization: Quantization | None = None,
) -> PlannedConversion:
    """Find the family's rules and check them against the checkpoint; nothing is written.

    dtype: "fp32", "fp16" or "bf16"; None: the checkpoint's own. quantization: of the layers' matrices. Raises
    UnsupportedError for a model type or setting that this version does not run, CheckpointError where a
    tensor is missing, unknown or misshapen.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}")
    if checkpoint.plan is not None:
        name = None if model_name is None else _model_name(model_name, checkpoint)
        config, conversions = checkpoint.plan(dtype, name)
        config = replace(config, quantization=quantization)
        own = {name: name for name in checkpoint.tensors.shapes}
        return PlannedConversion(checkpoint, config, conversions, own)
    source = family_of(checkpoint.config.model_type, checkpoint.path)
    _check_sizes(checkpoint)
    names = full_names(checkpoint.tensors.shapes, source)
    tied = settle_head(checkpoint, source, names)
    size = checkpoint.config.vocab_size  # some configs name ids of another vocabulary
    end_id = next((token for token in checkpoint.eos_ids if 0 <= token < size), -1)
    # an empty prompt is replaced by the start id, so it must be a token even if the model names none
    named = (token for token in (checkpoint.bos_id, end_id) if token is not None)
    start_id = next((token for token in named if 0 <= token < size), 0)
    common = {
        "model_name": _model_name(model_name, checkpoint),
        "start_id": start_id,
        "end_id": end_id,
        "more_end_ids": _more_end_ids(checkpoint, end_id),
        "weight_dtype": dtype or checkpoint_dtype(checkpoint, names[source.embedding]),
        "tied_head": tied,
    }
    try:
        config = source.model_config(checkpoint.config, **common)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the config of {checkpoint.path} does not describe a model: {found}") from None
    _check_numbers(config, checkpoint)
    try:
        models.check_config(config)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path} makes a model that does not load: {error}") from None
    shapes = {full: checkpoint.tensors.shapes[own] for full, own in names.items()}
    config = with_layer_sizes(config, source, shapes, read_declared(checkpoint.path, config))
    ignored = expand(source.ignored, config.num_layers) | ({source.head} if tied else set())
    if isinstance(checkpoint.tensors, QuantizedSource):
        empty = checkpoint.tensors.empty_biases()
        ignored |= {full for full, own in names.items() if own in empty}
    specs = models.family(config.family).weight_specs(config)
    rules, where = rules_of_layers(source, config), source.source_file
    conversions = plan_conversions(rules, specs, shapes, ignored, config.num_layers, where)
    if config.layer_sizes or (checkpoint.fills_reference and source.config_class is None):
        checkpoint.reference = partial(_filled_reference, checkpoint, config, source, names)
    config = replace(config, quantization=quantization)
    return PlannedConversion(checkpoint, config, conversions, names)


def _filled_reference(
    checkpoint: Checkpoint,
    config: ModelConfig,
    source: CheckpointFamily,
    names: dict[str, str],
    dtype: torch.dtype,
) -> torch.nn.Module:
    """transformers' model of a checkpoint whose files transformers cannot read."""

    def read(name: str) -> torch.Tensor:
        return checkpoint.tensors.read(names[name])

    def tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        return unpruned_tensors(config, source, names, read, shapes)

    return model_of(checkpoint.config, tensors, dtype)


def _check_sizes(checkpoint: Checkpoint) -> None:
    """CheckpointError for impossible sizes, before anything is allocated per layer."""
    tensors = len(checkpoint.tensors.shapes)
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        size = getattr(checkpoint.config, key, None)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 31:
            found = f"{key} = {str(size)[:80]}"
            raise CheckpointError(f"the config of {checkpoint.path} has {found}; wanted 1 or more")
    if checkpoint.config.num_hidden_layers > tensors:
        found = f"num_hidden_layers = {checkpoint.config.num_hidden_layers:,}"
        raise CheckpointError(
            f"the config of {checkpoint.path} has {found}; its files hold {tensors} tensors"
        )


def _check_numbers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    for key in ("num_heads", "num_kv_heads", "head_size", "mlp_size", "max_positions"):
        size = getattr(config, key)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 31:
            found = f"{key} = {str(size)[:80]}"
            raise CheckpointError(f"the config of {checkpoint.path} has {found}; wanted 1 or more")
    numbers = {"norm_eps": config.norm_eps}
    if config.rope is not None:
        rope = config.rope
        numbers.update(rope_theta=rope.theta, factor=rope.factor, low_freq_factor=rope.low_freq_factor)
        numbers.update(high_freq_factor=rope.high_freq_factor)
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            wanted = "a finite number of 0 or more"
            raise CheckpointError(f"the config of {checkpoint.path} has {key} = {value}; wanted {wanted}")


def _more_end_ids(checkpoint: Checkpoint, end_id: int) -> tuple[int, ...]:
    """Return the end tokens after the first one.

    Raises CheckpointError if there are more than an engine supports.
    """
    size = checkpoint.config.vocab_size
    ids = [token for token in dict.fromkeys(checkpoint.eos_ids) if 0 <= token < size]
    if len(ids) > MAX_END_IDS:
        found = f"{checkpoint.path} names {len(ids)} end tokens"
        raise CheckpointError(f"{found} (eos_token_id); this version has room for {MAX_END_IDS}")
    return tuple(token for token in ids if token != end_id)


def _model_name(given: str | None, checkpoint: Checkpoint) -> str:
    """model_name of config.ini: a given name is checked, a folder's name is adapted to the file's syntax."""
    unfit = r"[^\w .+\-]"
    if given is None:
        return re.sub(unfit, "-", checkpoint.name, flags=re.ASCII).strip() or "model"
    if not given.strip() or re.search(unfit, given, flags=re.ASCII):
        raise ConfigError(f"model_name is {given!r}; wanted letters, digits, blanks and _ . + -")
    return given


def full_names(shapes: dict[str, tuple[int, ...]], family: CheckpointFamily) -> dict[str, str]:
    """transformers' full name -> the checkpoint's own, which has no prefix if it is of the bare model."""
    prefix = "" if any(name.startswith(family.prefix) for name in shapes) else family.prefix
    today = {family.renamed.get(name, name): name for name in shapes}
    head = family.head.removesuffix("weight")  # and its bias
    return {name if name.startswith(head) else prefix + name: own for name, own in today.items()}


def settle_head(checkpoint: Checkpoint, family: CheckpointFamily, names: dict[str, str]) -> bool:
    """Return whether the head is the word embedding, as transformers 5 decides when it loads the checkpoint.

    If the config ties them and both are stored, equal tensors are tied and different ones are not; if one
    is stored, it serves as both (and `names` is completed). If the config does not tie them, both must be
    stored; equal ones need one file.
    """
    has_embedding, has_head = family.embedding in names, family.head in names
    ties = checkpoint.config.tie_word_embeddings
    if has_embedding and has_head:
        return torch.equal(
            checkpoint.tensors.read(names[family.embedding]), checkpoint.tensors.read(names[family.head])
        )
    if not (has_embedding or has_head) or not ties:
        missing = family.head if has_embedding else family.embedding
        wanted = family.embedding if ties else f"{family.embedding} and {family.head}"
        raise CheckpointError(
            f"{checkpoint.path} has no {missing}; tie_word_embeddings = {str(ties).lower()} wants {wanted}"
        )
    if not has_embedding:
        names[family.embedding] = names.pop(family.head)
    return True


def checkpoint_dtype(checkpoint: Checkpoint, name: str) -> str:
    """Return the dtype name of the checkpoint's tensor `name`; "fp32" for wider ones."""
    dtype = checkpoint.tensors.dtype(name)
    if dtype == torch.float64:
        return "fp32"
    found = next((known for known, torch_dtype in TORCH_DTYPES.items() if torch_dtype == dtype), None)
    if found is None:
        raise CheckpointError(f"{name} of {checkpoint.path} is {dtype}; wanted a floating dtype")
    return found
