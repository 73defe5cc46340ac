"""`python -m tridecode.tools.bench.engines MODULE JOB RESULT`: one engine's run, see run_apart."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.bench.measure import Job


def main(module: str, job_file: str, result_file: str) -> None:
    engine = importlib.import_module(f"tridecode.tools.bench.engines.{module}").ENGINE
    fields = json.loads(Path(job_file).read_text(encoding="utf-8"))
    for key in ("batches", "prompts", "outputs"):
        fields[key] = tuple(tuple(item) if isinstance(item, list) else item for item in fields[key])
    try:
        result = engine.run(Job(**fields))
    except TridecodeError as error:
        result = {"error": str(error)}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
