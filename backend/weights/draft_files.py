"""A trained drafter on disk: a folder with draft.json, its description, and draft.safetensors, its tensors.

`tridecode train-draft` writes it, and the engine reads it. Nothing in it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.base.file_digest import file_sha256
from tridecode.backend.configuration.model_config import ModelConfig

INFO_FILE, TENSORS_FILE = "draft.json", "draft.safetensors"
#: version of the format of the two files
FORMAT = "tridecode-draft-1"
HEADS, MODEL, GLIDE = "heads", "model", "glide"
#: kinds whose tensors are in draft.safetensors; a draft model is a checkpoint
TRAINED = (HEADS, GLIDE)
#: fields of DraftInfo that must equal those of the target's layer whose cache a GLIDE layer reads
_GEOMETRY = ("num_heads", "num_kv_heads", "head_size")
#: maximum drafts per step: a step verifies one token and 15 drafts
MOST_DEPTH = 15
_MAX_INFO_BYTES = 1 << 20
_MAX_WIDTH = 1 << 20
_WIDTH = 8192
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DraftInfo(msgspec.Struct, frozen=True):
    """draft.json.

    family, hidden_size, vocab_size: of the target. depth: number of drafts. width: size of the inner layer
    or, of a GLIDE layer, of its MLP. target: digest of the checkpoint that the target was converted from; "":
    unknown. tokens_per_step: measured on held-back prompts, greedily, with 1 to `depth` drafts. texts:
    training settings: tokens, prompts, epochs, seed, temperature. digest: SHA-256 of draft.safetensors, in
    hexadecimal; "": not checked. Only of a GLIDE layer: layer: the target's layer whose cache it reads;
    num_heads, num_kv_heads, head_size: of this layer, and of both attentions of the GLIDE layer.
    """

    format: str
    kind: str
    family: str
    hidden_size: int
    vocab_size: int
    depth: int
    width: int
    target: str = ""
    tokens_per_step: list[float] = []
    texts: dict[str, float] = {}
    digest: str = ""
    layer: int = -1
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of heads or a GLIDE layer."""
        if self.kind == GLIDE:
            heads = self.num_heads, self.num_kv_heads, self.head_size
            return glide_shapes(self.hidden_size, self.width, *heads)
        return head_shapes(self.hidden_size, self.width, self.depth)


@dataclass(frozen=True)
class TrainedDraft:
    """A loaded drafter. tensors: on the CPU, in the dtype of the file."""

    info: DraftInfo
    tensors: Mapping[str, Tensor]


def write_draft(folder: Path, info: DraftInfo, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter into a new or empty folder, with the digest of its tensors. draft.json is written last:
    a folder without it is incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TENSORS_FILE
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    write_info(folder, replace(info, digest=file_sha256(path)))


def write_info(folder: Path, info: DraftInfo) -> None:
    """Write draft.json. The folder of a draft model also has one, for information."""
    text = msgspec.json.format(msgspec.json.encode(info), indent=1)
    (folder / INFO_FILE).write_bytes(text + b"\n")


def read_info(folder: Path, model: ModelConfig, kind: str) -> DraftInfo:
    """Return draft.json of a drafter for this target.

    Raises ConfigError for a file that is missing or damaged, another kind, another hidden size, another
    vocabulary or, of a GLIDE layer, other heads.
    """
    info, path = _decoded(folder), folder / INFO_FILE
    if info.kind != kind:
        raise ConfigError(f"{path} describes a drafter of kind {info.kind!r}; speculation wants {kind!r}")
    for name in ("hidden_size", "vocab_size"):
        found, wanted_size = getattr(info, name), getattr(model, name)
        if found != wanted_size:
            raise ConfigError(f"{path} has {name} {found}; the served model has {wanted_size}")
    if not 1 <= info.depth <= MOST_DEPTH:
        raise ConfigError(f"{path} has depth {info.depth}; wanted 1 to {MOST_DEPTH}")
    if not 1 <= info.width <= _MAX_WIDTH:
        raise ConfigError(f"{path} has width {info.width}; wanted 1 to {_MAX_WIDTH:,}")
    if kind == GLIDE:
        _check_layer(path, info, model)
    return info


def kind_of(folder: Path) -> str:
    """Return the kind of the trained drafter in a folder; "" if it has none, as that of a draft model.

    Raises ConfigError for a draft.json that is missing or damaged, or of a kind without tensors, and for one
    of heads or a GLIDE layer without draft.safetensors.
    """
    has_tensors, has_info = ((folder / name).is_file() for name in (TENSORS_FILE, INFO_FILE))
    if not has_tensors and not has_info:
        return ""
    kind = _decoded(folder).kind
    if not has_tensors:
        if kind in TRAINED:
            raise ConfigError(
                f"{folder} describes {kind} in {INFO_FILE} and has no {TENSORS_FILE}; wanted both"
            )
        return ""
    if kind not in TRAINED:
        raise ConfigError(f"{folder / INFO_FILE} has kind {kind!r}; wanted {' or '.join(TRAINED)}")
    return kind


def _check_layer(path: Path, info: DraftInfo, model: ModelConfig) -> None:
    if not 0 <= info.layer < model.num_layers:
        raise ConfigError(f"{path} has layer {info.layer}; the served model has 0 to {model.num_layers - 1}")
    layer = model.of_layer(info.layer)
    for name in _GEOMETRY:
        found, wanted = getattr(info, name), getattr(layer, name)
        if found != wanted:
            raise ConfigError(
                f"{path} has {name} {found}; layer {info.layer} of the served model has {wanted}"
            )


def _decoded(folder: Path) -> DraftInfo:
    """Return draft.json. Raises ConfigError for a file that is missing, damaged or of another format."""
    path = folder / INFO_FILE
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_INFO_BYTES + 1)
    except OSError as error:
        wanted = "wanted a folder that `tridecode train-draft` wrote"
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}; {wanted}") from None
    if len(data) > _MAX_INFO_BYTES:
        raise ConfigError(f"{path} holds more than {_MAX_INFO_BYTES:,} bytes")
    try:
        info = msgspec.json.decode(data, type=DraftInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a valid description of a drafter: {error}") from None
    if info.format != FORMAT:
        raise ConfigError(f"{path} has format {info.format!r}; this version reads {FORMAT!r}")
    return info


def other_target(info: DraftInfo, digest: str) -> str:
    """Return a warning if a drafter was trained for a checkpoint other than the served one, else "".

    digest: Manifest.source of the served weights. An unknown digest on either side gives no warning.
    """
    if not info.target or not digest or info.target == digest:
        return ""
    return (
        f"the drafter was trained for the checkpoint {info.target[:12]}; the served one is {digest[:12]}: "
        "answers are the same, but fewer drafts may be accepted"
    )


def usual_width(hidden: int) -> int:
    """Return the default size of the heads' inner layer: six times the hidden size, at most _WIDTH."""
    return max(hidden, min(6 * hidden, _WIDTH))


def layer_fields(info: DraftInfo, model: ModelConfig, layer: int) -> DraftInfo:
    """Return the description of a GLIDE layer that reads the cache of this layer of the target."""
    shape = model.of_layer(layer)
    return replace(info, layer=layer, **{name: getattr(shape, name) for name in _GEOMETRY})


def head_shapes(hidden: int, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of one-pass heads."""
    return {
        "hidden.weight": (width, hidden),
        "hidden.bias": (width,),
        "token.weight": (width, hidden),
        "outs.weight": (depth * hidden, width),
    }


def glide_shapes(
    hidden: int, width: int, num_heads: int, num_kv_heads: int, head_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a GLIDE layer: matrices (out, in), norms (C,)."""
    queries, keys = num_heads * head_size, num_kv_heads * head_size
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "cross_attn_layernorm.weight": (hidden,),
        "cross_attn.q_proj.weight": (queries, hidden),
        "cross_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }


def open_trained(folder: Path, model: ModelConfig, kind: str) -> TrainedDraft:
    """Return the trained drafter of this kind in a folder. Raises ConfigError or WeightFileError."""
    info = read_info(folder, model, kind)
    return TrainedDraft(info, read_tensors(folder, info))


def read_tensors(folder: Path, info: DraftInfo) -> dict[str, Tensor]:
    """Return the tensors of a drafter on the CPU, in the dtype of the file.

    Raises WeightFileError for other names, shapes or dtypes than `info` describes, for a damaged file, and
    for another digest.
    """
    path, shapes = folder / TENSORS_FILE, info.shapes
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if names != set(shapes):
                raise WeightFileError(f"{path} has the tensors {sorted(names)}; wanted {sorted(shapes)}")
            for name, shape in shapes.items():
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    raise WeightFileError(f"{path}: {name} is {found}; wanted {shape}")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        size = path.stat().st_size
        raise WeightFileError(
            f"{path}, of {size:,} bytes, is not a valid safetensors file: {error}"
        ) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise WeightFileError(f"{path}: {name} is {tensor.dtype}; wanted float32, float16 or bfloat16")
    found_digest = file_sha256(path) if info.digest else ""
    if found_digest != info.digest:
        raise WeightFileError(
            f"{path} has the SHA-256 {found_digest[:12]}; {folder / INFO_FILE} wants {info.digest[:12]}"
        )
    return tensors
