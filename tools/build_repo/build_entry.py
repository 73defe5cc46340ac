"""Builds an entry of the repository cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tridecode.backend.base.errors import CheckpointError
from tridecode.tools.build_repo import options
from tridecode.tools.build_repo.cache import Conversion

_GROUP = 128  # any: only the name is checked
_STDERR = 2  # that of the process: in a notebook or a test, sys.stderr may have no descriptor


def check_conversion(conversion: Conversion) -> None:
    """Raise ConfigError for options that no checkpoint can have."""
    options.quantization_of(conversion.quantize, _GROUP)
    contracts, owner = options.contracts_of(conversion.for_clients, list(conversion.contracts), "")
    options.check_models(contracts, owner)
    degrees = {"tensor_para_size": conversion.tp, "pipeline_para_size": conversion.pp}
    options.check_settings({**options.settings_of(conversion.settings), **degrees})
    options.check_dtype(conversion.dtype)


def build_entry(checkpoint: str, output: Path, conversion: Conversion) -> None:
    """Run `tridecode build-repo` in a process of its own, so that torch does not stay in this one.

    Its output goes to stderr. Raises CheckpointError where it fails.
    """
    command = [sys.executable, "-m", "tridecode.tools.cli", "build-repo", "--model", checkpoint]
    command += ["--output", str(output), *conversion.options()]
    with subprocess.Popen(command, stdout=_STDERR) as process:
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reaches both; build-repo cleans up
            process.wait()
            raise
    if code != 0:
        raise CheckpointError(f"{checkpoint} could not be converted; the lines above say why")
