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

    name: in tables and result files. commands: of `tridecode bench`, which include it. run: measures a job:
    {"engine", "model", "dtype", ...} and the figures of measure(), or {"error"} where it is not installed.
    ours: reads a model repository; other engines read the Hugging Face checkpoint.
    """

    name: str
    commands: tuple[str, ...]
    run: Callable[[Job], dict[str, Any]]
    ours: bool = False


def engines_of(command: str) -> list[BenchEngine]:
    """The engines of a command of `tridecode bench`: ours first, then by name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [importlib.import_module(f"{__name__}.{name}").ENGINE for name in names]
    return sorted((one for one in found if command in one.commands), key=lambda one: (not one.ours, one.name))


def run_apart(engine: BenchEngine, job: Job) -> dict[str, Any]:
    """engine.run(job) in a process of its own, so that its GPU memory is free afterwards.

    {"error"} with the end of its log if it fails: a failure of one engine does not stop the others.
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
    """Return the environment: our engine's threads spin as behind the server; other engines use their
    defaults.
    """
    environment = dict(os.environ)
    if engine.ours:
        spin_briefly(environment)
    elif (SPIN[0], environment.get(SPIN[0])) == SPIN:
        del environment[SPIN[0]]
    return environment
