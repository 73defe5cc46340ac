"""Reads checkpoints in llama.cpp's format, .gguf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tridecode.backend.base.checkpoint_files import require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.families import CheckpointFamily, gguf_family
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import QKV_PARTS
from tridecode.converters.gguf.special_tokens import end_ids, named_id
from tridecode.converters.gguf.tokenizer import tokenizer_notes
from tridecode.converters.references.gguf import gguf_reference, reads_itself
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.containers import foreign_format
from tridecode.converters.sources.gguf_header import check_gguf_header
from tridecode.converters.sources.gguf_metadata import GgufMetadata

_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: tensors that are read as settings of the rotary embedding
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class _Piece:
    """Rows of a stored tensor. name: llama.cpp's name. rows: a slice; None: all rows; an int: one row, as a
    vector."""

    held: gguf.ReaderTensor
    name: str
    rows: slice | int | None = None


class GgufSource:
    """A checkpoint in llama.cpp's format, whose tensors are dequantised to float32 when they are read.

    `read` reverses the changes of llama.cpp's converter, by the family's GgufRules.
    """

    def __init__(
        self,
        reader: gguf.GGUFReader,
        family: CheckpointFamily,
        config: PreTrainedConfig,
        absent: tuple[str, ...] = (),
    ):
        assert family.gguf is not None
        self._rules, self._config = family.gguf, config
        layers = min(config.num_hidden_layers, len(reader.tensors))  # a damaged file may claim millions
        held = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in _FACTORS}
        self._pieces = dict(_placed(held, family, config, layers, absent))
        used = {piece.held.name for pieces in self._pieces.values() for piece in pieces}
        self._pieces |= {name: (_Piece(held[name], name),) for name in held.keys() - used}
        self.shapes = {name: self._shape(pieces) for name, pieces in self._pieces.items()}

    @property
    def is_plain(self) -> bool:
        """Return whether each tensor is exactly one tensor of the file, neither a slice nor a
        concatenation.
        """
        return all(len(pieces) == 1 and pieces[0].rows is None for pieces in self._pieces.values())

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype; for a quantised tensor float16, the dtype of its scales."""
        return _GGUF_DTYPES.get(self._pieces[name][0].held.tensor_type.name, torch.float16)

    def read(self, name: str) -> Tensor:
        parts = [self._read(piece) for piece in self._pieces[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, piece: _Piece) -> Tensor:
        stored = torch.from_numpy(_dequantized(piece.held))
        if piece.held.name.endswith(self._rules.transposed):
            return stored.t()
        part = stored if piece.rows is None else stored[piece.rows]
        return self._rules.restore(piece.name, part, self._config)

    def _shape(self, pieces: tuple[_Piece, ...]) -> tuple[int, ...]:
        shapes = [_part_shape(piece) for piece in pieces]
        if pieces[0].held.name.endswith(self._rules.transposed):
            return tuple(reversed(shapes[0]))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else shapes[0]


def _stored_shape(held: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(held.shape))  # the fastest axis comes first in the file


def _part_shape(piece: _Piece) -> tuple[int, ...]:
    shape = _stored_shape(piece.held)
    if isinstance(piece.rows, int):
        return shape[1:]
    return shape if piece.rows is None else (piece.rows.stop - piece.rows.start, *shape[1:])


def _dequantized(held: gguf.ReaderTensor) -> np.ndarray:
    return gguf.dequantize(held.data, held.tensor_type).copy().reshape(_stored_shape(held))


def _placed(
    held: dict[str, gguf.ReaderTensor],
    family: CheckpointFamily,
    config: PreTrainedConfig,
    layers: int,
    absent: tuple[str, ...],
) -> Iterator[tuple[str, tuple[_Piece, ...]]]:
    """Map transformers' name of each tensor that the rules read to its pieces, by gguf's own name table."""
    rules = family.gguf
    assert rules is not None
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == rules.architecture)
    table = gguf.get_tensor_name_map(key, layers)
    per_layer = (rule.of_layer(i) for rule in family.rules(config.num_attention_heads) for i in range(layers))
    for source in dict.fromkeys(source for rule in per_layer for source in rule.sources):
        if any(f".{module}." in source for module in absent):
            continue
        names = (source, source.removeprefix(family.prefix))
        found = next(
            (name for name in (table.get_name(own, (".weight", ".bias")) for own in names) if name), ""
        )
        if found in held:
            yield source, (_Piece(held[found], found),)
        elif pieces := _fused(held, found, config) or _joined(held, source, rules.joined):
            yield source, pieces
    for end, pattern in rules.rows.items():
        for i in range(layers):
            name = f"blk.{i}.{end}"
            for row in range(_stored_shape(held[name])[0]) if name in held else ():
                full = pattern.replace("{i}", str(i)).replace("{row}", str(row))
                yield full, (_Piece(held[name], name, row),)


def _fused(held: dict[str, gguf.ReaderTensor], name: str, config: PreTrainedConfig) -> tuple[_Piece, ...]:
    """Return attn_q, attn_k or attn_v, which newer converters may store as one attn_qkv."""
    part = next((part for part in QKV_PARTS if f".{part}." in name), None)
    fused = held.get(name.replace(f".{part}.", ".attn_qkv.")) if part else None
    if fused is None or part is None:
        return ()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    size = _stored_shape(fused)[0] // (heads + 2 * kv_heads)
    ends = (heads * size, (heads + kv_heads) * size, (heads + 2 * kv_heads) * size)
    at = QKV_PARTS.index(part)
    return (_Piece(fused, name, slice(ends[at - 1] if at else 0, ends[at])),)


def _joined(
    held: dict[str, gguf.ReaderTensor], source: str, joined: Mapping[str, tuple[str, ...]]
) -> tuple[_Piece, ...]:
    """Return the pieces whose rows make up transformers' fused tensor."""
    module, parts = next(((module, parts) for module, parts in joined.items() if module in source), ("", ()))
    if not parts:
        return ()
    layer, end = source.split(".layers.")[1].split(".", 1)[0], source.rpartition(".")[2]
    names = [f"blk.{layer}.{part}.{end}" for part in parts]
    return tuple(_Piece(held[name], name) for name in names) if all(name in held for name in names) else ()


def open_gguf(path: Path) -> Checkpoint:
    """Open a .gguf file; the only tensors read now are the factors of the rotary embedding.

    Raises CheckpointError or UnsupportedError.
    """
    reader, fields = _read_gguf(require_file(path))
    family = gguf_family(fields.get("general.architecture"), path)
    assert family.gguf is not None
    _check_whole(reader, fields, path)
    held = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: _stored_shape(tensor) for name, tensor in held.items()}
    header = GgufHeader(fields, shapes, lambda name: _dequantized(held[name]), path)
    config = _config(family, header)
    notes = header.check() + tokenizer_notes(fields)
    source = GgufSource(reader, family, config, family.gguf.absent(header))
    checkpoint = Checkpoint(
        path,
        config,
        source,
        named_id(fields, "bos"),
        end_ids(fields),
        fields,
        notes=notes,
    )
    checkpoint.reference = partial(gguf_reference, checkpoint, family, source.is_plain)
    is_independent = reads_itself(family, source.is_plain)
    checkpoint.reference_tensors = "read by transformers" if is_independent else "read by this version"
    return checkpoint


def _check_whole(reader: gguf.GGUFReader, fields: GgufMetadata, path: Path) -> None:
    """Raise UnsupportedError for a part of a split file, and for a quantisation type that cannot be
    dequantised.
    """
    if fields.get("split.count", 1) not in (0, 1):
        found = f"part {int(fields.get('split.no', 0)) + 1} of {fields['split.count']}"
        raise UnsupportedError(f"{path} is {found} of a split file; join them with llama-gguf-split --merge")
    for kind, name in {tensor.tensor_type: tensor.name for tensor in reader.tensors}.items():
        if not _is_expanded(kind):
            found = f"{name} is stored as {kind.name}"
            raise UnsupportedError(f"{path}: {found}, which this version cannot dequantise")


@cache
def _is_expanded(kind: gguf.GGMLQuantizationType) -> bool:
    """Return whether the gguf package can dequantise a type."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return kind.name in _GGUF_DTYPES
    return True


def _config(family: CheckpointFamily, header: GgufHeader) -> PreTrainedConfig:
    """Return transformers' config. Raises CheckpointError if the metadata does not describe a model."""
    assert family.gguf is not None
    try:
        settings = family.gguf.settings(header)
        ids = {
            f"{name}_token_id": header.fields.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }
        settings = {"pad_token_id": None, **ids, **settings}
        config_class = family.config_class or CONFIG_MAPPING[family.model_types[0]]
        return config_class(**settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"the metadata of {header.path} does not describe a model: {found}") from None


def _read_gguf(path: Path) -> tuple[gguf.GGUFReader, GgufMetadata]:
    """Return the file's reader and metadata. Raises CheckpointError for a file that is damaged or not
    GGUF."""
    check_gguf_header(path)
    try:
        reader = gguf.GGUFReader(path)
        fields = GgufMetadata(reader.fields, path)
        for name, held in reader.fields.items():
            if held.types[:1] != [gguf.GGUFValueType.ARRAY]:
                fields[name]
    except Exception as error:  # the reader indexes past the end of a short file, and checks little
        found = (
            foreign_format(path) or f"it is damaged or cut short at {path.stat().st_size:,} bytes ({error})"
        )
        raise CheckpointError(f"{path} is not a readable GGUF file: {' '.join(found.split())}") from None
    return reader, fields
