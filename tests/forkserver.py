"""Processes of tests that begin with the modules that a server has imported once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

#: of both users, because the first one starts the server: tests/bounded.py measures readers without their
#: imports, and each rank needs torch
PRELOADED = [
    "tridecode.converters.checkpoint",
    "tridecode.converters.tokenizers.files",
    "tridecode.converters.adapters",
    "tridecode.converters.prompts",
    "tridecode.converters.sources.peft_prompts",
    "tridecode.tools.build_repo.build",
    "tests.backend.engine.rank_process",
]


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found
