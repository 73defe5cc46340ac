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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig

INFO_FILE, TENSORS_FILE = "draft.json", "draft.safetensors"
#: version of the format of the two files
FORMAT = "tridecode-draft-1"
HEADS, MODEL = "heads", "model"
#: maximum drafts per step: a step verifies one token and 15 drafts
MOST_DEPTH = 15
_MAX_INFO_BYTES = 1 << 20
_MAX_WIDTH = 1 << 20
_WIDTH = 8192
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DraftInfo(msgspec.Struct, frozen=True):
    """draft.json.

    family, hidden_size, vocab_size: of the target. depth: number of drafts. width: size of the inner
    layer. target: digest of the checkpoint that the target was converted from; "": unknown. tokens_per_step:
    measured on held-back prompts, greedily, with 1 to `depth` drafts. texts: training settings: tokens,
    prompts, epochs, seed, temperature.
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


@dataclass(frozen=True)
class TrainedDraft:
    """A loaded drafter. tensors: on the CPU, in the dtype of the file."""

    info: DraftInfo
    tensors: Mapping[str, Tensor]


def write_draft(folder: Path, info: DraftInfo, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter into a new folder. draft.json is written last: a folder without it is incomplete."""
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE
    )
    write_info(folder, info)


def write_info(folder: Path, info: DraftInfo) -> None:
    """Write draft.json. The folder of a draft model also has one, for information."""
    text = msgspec.json.format(msgspec.json.encode(info), indent=1)
    (folder / INFO_FILE).write_bytes(text + b"\n")


def read_info(folder: Path, model: ModelConfig, kind: str) -> DraftInfo:
    """Return draft.json of a drafter for this target.

    Raises ConfigError for a file that is missing or damaged, another kind, another hidden size or another
    vocabulary.
    """
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


def head_shapes(hidden: int, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of one-pass heads."""
    return {
        "hidden.weight": (width, hidden),
        "hidden.bias": (width,),
        "token.weight": (width, hidden),
        "outs.weight": (depth * hidden, width),
    }


def open_heads(folder: Path, model: ModelConfig) -> TrainedDraft:
    """Return the one-pass heads in a folder. Raises ConfigError or WeightFileError."""
    info = read_info(folder, model, HEADS)
    return TrainedDraft(info, read_tensors(folder, head_shapes(info.hidden_size, info.width, info.depth)))


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of a drafter on the CPU, in the dtype of the file.

    shapes: names and shapes that it must have. Raises WeightFileError for other names, shapes or dtypes
    and for a damaged file, before any tensor is read.
    """
    path = folder / TENSORS_FILE
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
        raise WeightFileError(f"{path} is not a valid safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise WeightFileError(f"{path}: {name} is {tensor.dtype}; wanted float32, float16 or bfloat16")
    return tensors
