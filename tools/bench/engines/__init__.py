"""The engines that `tridecode bench` measures: one file each.

A file of this package that defines ENGINE is registered. Its `run` loads the engine, passes a `Generate` to
measure() and returns the figures with what they were measured on.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tridecode.backend.base.threads import SPIN, spin_briefly
from tridecode.tools.bench.measure import Job


@dataclass(frozen=True)
class BenchEngine:
    """One engine.

    name: its name in tables and result files. commands: the commands of `tridecode bench` that include it.
    run: measures a job and returns {"engine", "model", "dtype", ...} with the figures of measure(), or
    {"error"} if the engine is not installed. ours: reads a model repository; other engines read the Hugging
    Face checkpoint.
    """

    name: str
    commands: tuple[str, ...]
    run: Callable[[Job], dict[str, Any]]
    ours: bool = False


def engines_of(command: str) -> list[BenchEngine]:
    """Return the engines of a command of `tridecode bench`, ours first, the others by name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [importlib.import_module(f"{__name__}.{name}").ENGINE for name in names]
    return sorted((one for one in found if command in one.commands), key=lambda one: (not one.ours, one.name))


def run_apart(engine: BenchEngine, job: Job) -> dict[str, Any]:
    """Run engine.run(job) in a separate process, so that its GPU memory is free afterwards.

    Returns {"error"} with the end of its log if it fails, so that one engine does not stop the others.
    """
    module = engine.run.__module__.rpartition(".")[2]
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", __name__, module, str(job_file), str(result_file)]
        environment = engine_environment(engine)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        if done.returncode == 0 and result_file.exists():
            return json.loads(result_file.read_text(encoding="utf-8"))
    return {"error": f"{engine.name} ended with code {done.returncode}: {done.stdout[-2000:].strip()}"}


def engine_environment(engine: BenchEngine) -> dict[str, str]:
    """Return the environment: threads of our engine spin, as in the server; other engines use defaults."""
    environment = dict(os.environ)
    if engine.ours:
        spin_briefly(environment)
    elif (SPIN[0], environment.get(SPIN[0])) == SPIN:
        del environment[SPIN[0]]
    return environment
