"""Everything that needs a GPU, in one run: the tests marked gpu, then the benchmarks, as one JSON file.

    python tools/bench/gpu_report.py --name h200 [--out DIR] [operation ...]

CI has no GPU: the file under tools/bench/results is the evidence, committed with the change it speaks for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from tridecode.kernels.bench.__main__ import OPERATIONS
from tridecode.kernels.bench.cases import Bench

ROOT = Path(__file__).resolve().parents[2]


def run_tests() -> dict[str, object]:
    """The GPU tests' closing line and status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-12:]), flush=True)
    return {
        "command": " ".join(command[1:]),
        "status": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-500:],
    }


def run_benchmarks(operations: list[str]) -> list[dict[str, object]]:
    bench, records = Bench(), []
    for operation in operations:
        started = time.monotonic()
        for result in getattr(bench, operation)():
            print(result.line(), flush=True)
            records.append(result.record())
        print(f"[{operation}: {time.monotonic() - started:.0f} s]", flush=True)
    return records


def describe() -> dict[str, object]:
    from tridecode.kernels.library import Library

    card = torch.cuda.get_device_properties(0)
    return {
        "card": card.name,
        "multiprocessors": card.multi_processor_count,
        "memory_bytes": card.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "library": Library().info,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="gpu", help="of the result file, after the date")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "bench" / "results")
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS), help=f"of {', '.join(OPERATIONS)}")
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "command": "python tools/bench/gpu_report.py " + " ".join(sys.argv[1:]),
        **describe(),
    }
    report["tests"] = run_tests()
    report["benchmarks"] = run_benchmarks(arguments.operations)
    path = arguments.out / f"{datetime.date.today().isoformat()}-{arguments.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    if report["tests"]["status"]:  # type: ignore[index]
        sys.exit(1)


if __name__ == "__main__":
    main()
