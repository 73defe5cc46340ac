"""The GPUs that this node shows its ranks, without torch: the supervisor must not open a CUDA context."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tridecode.backend.configuration.rank_gpus import VISIBLE


def count_visible(dev: Path = Path("/dev")) -> int:
    """Return the number of GPUs that CUDA will see: those of CUDA_VISIBLE_DEVICES, else all with a device
    file.
    """
    present = sum(1 for entry in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name))
    named = os.environ.get(VISIBLE)
    if named is None:
        return present
    count = 0
    for part in named.split(","):
        name = part.strip()
        if not name or name == "-1" or (name.isdigit() and int(name) >= present):
            break  # CUDA ignores an invalid entry and all that follow
        count += 1
    return count if present else 0
