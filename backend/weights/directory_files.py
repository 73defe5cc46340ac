"""Infers from the file names of a weight directory without manifest how many ranks wrote it, and whether
config.ini describes its tensors. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tridecode.backend.weights.layout import WeightSpec

_FILE = re.compile(r"(?P<name>model\..+?)(?:\.(?P<rank>\d{1,5}))?\.bin")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_NORM = ("weight", "bias")
#: tensors that only some networks have; those of layers are below model.layers.<i>
_OF_MODEL = {
    "model.wpe",
    "model.lm_head.bias",
    "model.project_in.weight",
    "model.project_out.weight",
    *(f"model.{name}_layernorm.{kind}" for name in ("pre_decoder", "final") for kind in _NORM),
}
_OF_LAYER = {
    "mlp.attention.bias.sum",
    *(
        f"{name}.{kind}"
        for name in (
            *("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            *("attention.query_key_value", "attention.dense", "attention.q_norm", "attention.k_norm"),
            *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
        for kind in _NORM
    ),
    *(
        f"after_{place}_adapter.{matrix}.{kind}"
        for place in ("attention", "ffn")
        for matrix in ("dense_h_to_4h", "dense_4h_to_h")
        for kind in _NORM
    ),
}
#: FasterTransformer's GPT-NeoX converters write both biases in addition to the sum that its engine reads
_SUMMED = re.compile(r"model\.layers\.\d+\.(attention\.dense|mlp\.dense_4h_to_h)\.bias")


@dataclass(frozen=True)
class StoredFiles:
    """Tensors by their names without rank and .bin.

    ranks: for each tensor the numbers of its files; empty for a tensor in one file.
    """

    ranks: dict[str, set[int]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Return one more than the index of the last layer with a file."""
        found = (_LAYER.fullmatch(name) for name in self.ranks)
        return max((int(match[1]) + 1 for match in found if match), default=0)


def stored_files(directory: Path) -> StoredFiles:
    """Return the tensors named by a directory's files; none if it cannot be listed."""
    stored = StoredFiles()
    try:
        names = os.listdir(directory)
    except OSError:
        return stored
    for match in filter(None, map(_FILE.fullmatch, names)):
        ranks = stored.ranks.setdefault(match["name"], set())
        if match["rank"] is not None:
            ranks.add(int(match["rank"]))
    return stored


def find_num_ranks(stored: StoredFiles, specs: Iterable[WeightSpec]) -> int:
    """Return the number of ranks for which split tensors were written, or 0 without split tensors.

    It is one more than the highest number of a file, so that a file in between may be missing.
    """
    split = (spec.name for spec in specs if spec.num_files(2) == 2)
    return max((max(stored.ranks.get(name, ()), default=-1) + 1 for name in split), default=0)


def unread_tensor(stored: StoredFiles, specs: Iterable[WeightSpec], num_layers: int) -> str:
    """Return why the files belong to another model than config.ini describes; "" if every known tensor is
    read.

    Files of tables, of int8 weights and of unknown names are ignored, as FasterTransformer does.
    """
    if stored.num_layers > num_layers:
        return f"num_layer = {num_layers}, and the files have {stored.num_layers} layers"
    read = {spec.name for spec in specs}
    has_sums = any(name.endswith(".mlp.attention.bias.sum") for name in read)
    for name in sorted(stored.ranks):
        if name in read or (has_sums and _SUMMED.fullmatch(name)):
            continue
        layer = _LAYER.fullmatch(name)
        if name in _OF_MODEL or (layer and layer[2] in _OF_LAYER):
            return f"a model without {name}, which is among the files"
    return ""
