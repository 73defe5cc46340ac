"""Opens a source checkpoint of any format; converters/sources has a reader for each.

All give transformers' config and tensors by transformers' names. Tensors are read one at a time: memory never
holds a whole checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from tridecode.backend.errors import CheckpointError
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.gguf import open_gguf
from tridecode.converters.sources.huggingface import download, open_directory


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a directory, a .gguf file or a hub id, reading no tensor. CheckpointError or UnsupportedError."""
    path = Path(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is a file, but not a .gguf; wanted a checkpoint's directory or a .gguf file"
            )
        return open_gguf(path)
    if not path.is_dir():
        path = download(str(model))
    if (path / "config.json").is_file():
        return open_directory(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_gguf(ggufs[0])
    found = f"{len(ggufs)} .gguf files (name one)" if ggufs else "neither config.json nor a .gguf file"
    raise CheckpointError(f"{path} holds {found}; wanted a Hugging Face checkpoint")
