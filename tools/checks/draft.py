"""Checks the draft model or the trained drafter of a repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES, require_file
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig, with_folders
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.drafters.draft_loading import (
    DRAFT,
    check_draft_tokenizer,
    draft_config,
)
from tridecode.backend.engine.device.drafters.trained_loading import trained_info
from tridecode.backend.weights.draft_files import INFO_FILE, TENSORS_FILE, TRAINED, open_trained
from tridecode.backend.weights.manifest import MANIFEST_FILE
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.progress import byte_progress
from tridecode.tools.checks.findings import Finding

_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 1 << 40
_FIX = "Build the repository again with --draft, or set speculation to off."


def draft_faults(
    folder: Path,
    where: str,
    engine: EngineConfig,
    target: ModelConfig,
    tokenizer: Path | None,
    checksums: bool,
) -> Iterator[Finding]:
    """Yield errors that the engine would raise at its start, and files that differ from the manifest.

    folder: of the engine's model; the paths of `engine` are relative to it. where: its config.pbtxt, for
    findings. tokenizer: folder of the served model's tokenizer; None: there is none. Kind and size of the
    untrusted files are checked first.
    """
    config = with_folders(engine, folder)
    if engine.drafter in TRAINED:
        yield from _trained_faults(where, config, target, checksums)
    if engine.drafter != DRAFT:
        return
    files = {"config.ini": _MAX_CONFIG_BYTES, MANIFEST_FILE: MAX_JSON_BYTES, "tokenizer.json": MAX_JSON_BYTES}
    try:
        for file in (Path(config.draft_path) / name for name in files):
            if os.path.lexists(file):
                require_file(file, files[file.name])
        draft = draft_config(config, target)
        if tokenizer is not None:
            require_file(tokenizer / "tokenizer.json", MAX_JSON_BYTES)
        check_draft_tokenizer(config, tokenizer)
        if draft is None or engine.weights != "files":
            return
        reader = WeightReader(Path(config.draft_path), draft)
    except (TridecodeError, OSError, ValueError, ArithmeticError, RecursionError) as error:
        yield Finding("error", where, str(error), "a draft model that fits", _FIX)
        return
    if checksums:
        total = sum(reader.file_bytes(spec) * len(reader.files(spec)) for spec in reader.specs.values())
        with byte_progress("checking the draft model's files", total) as progress:
            for problem in reader.checksum_problems(progress):
                yield Finding("error", config.draft_path, problem, "the bytes that were written", _FIX)


def _trained_faults(
    where: str, config: EngineConfig, target: ModelConfig, checksums: bool
) -> Iterator[Finding]:
    """Return what the engine would refuse of heads or a GLIDE layer. checksums: tensors are read, too."""
    files = {INFO_FILE: _MAX_CONFIG_BYTES, TENSORS_FILE: _MAX_TENSOR_BYTES}
    try:
        for file in (Path(config.draft_path) / name for name in files):
            if os.path.lexists(file):
                require_file(file, files[file.name])
        info = trained_info(config, target)
        if info is not None and checksums and config.draft_path != "none":
            open_trained(Path(config.draft_path), target, info.kind)
    except (TridecodeError, OSError, ValueError, ArithmeticError, RecursionError) as error:
        yield Finding("error", where, str(error), "a drafter that fits", _FIX)
