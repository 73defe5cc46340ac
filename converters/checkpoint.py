"""Opens a source checkpoint of any format; converters/sources has a reader for each.

All return transformers' config and tensors by transformers' names. Tensors are read one at a time: memory
never holds a whole checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.model_source import find_model
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.fastertransformer import find_weight_directory, open_weight_directory
from tridecode.converters.sources.gguf import open_gguf
from tridecode.converters.sources.huggingface import open_directory
from tridecode.converters.sources.megatron import find_megatron_directory, open_megatron
from tridecode.converters.sources.nemo import CONFIG_FILE, open_nemo


def open_checkpoint(model: str | Path, num_heads: int | None = None) -> Checkpoint:
    """Open a source of any format, reading no tensor; docs/reference/sources.md has the formats.

    model: a file, a directory, or a repository's id on the hub. num_heads: attention heads, for a checkpoint
    that does not record them. Raises CheckpointError or UnsupportedError.
    """
    path = find_model(model)
    if path.is_file() and path.suffix == ".nemo":
        return open_nemo(path)
    if path.is_file():
        if path.suffix != ".gguf":
            wanted = "a checkpoint's directory, a .gguf or a .nemo file"
            raise CheckpointError(f"{path} is a file, but not a .gguf or .nemo; wanted {wanted}")
        return open_gguf(path)
    if (path / "config.json").is_file():
        return open_directory(path)
    weights = find_weight_directory(path)
    if weights is not None:
        return open_weight_directory(weights)
    if (path / CONFIG_FILE).is_file():
        return open_nemo(path)
    ranks = find_megatron_directory(path)
    if ranks is not None:
        return open_megatron(ranks, num_heads)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_gguf(ggufs[0])
    found = f"{len(ggufs)} .gguf files (name one)" if ggufs else "neither config.json nor a .gguf file"
    raise CheckpointError(f"{path} holds {found}; wanted a Hugging Face checkpoint")
