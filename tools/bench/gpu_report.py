"""Runs everything that needs a GPU, the tests marked gpu and then the kernel benchmarks, and writes one JSON
file.

    python tools/bench/gpu_report.py --name h200 [--out DIR] [--workers N] [operation ...]

CI has no GPU: the file under tools/bench/results is committed with the change that it is evidence for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from tridecode.kernels.bench.__main__ import OPERATIONS
from tridecode.kernels.bench.rig import Rig
from tridecode.tools.bench.reports.report import command as typed

ROOT = Path(__file__).resolve().parents[2]


#: folders and files with tests marked gpu; tests/tools/bench/test_gpu_report.py compares them with the marks
GPU_TESTS = (
    "tests/kernels",
    "tests/backend/engine/test_adapters_gpu.py",
    "tests/backend/engine/test_draft_model_gpu.py",
    "tests/backend/engine/test_heads_gpu.py",
    "tests/backend/engine/test_combined_drafts_gpu.py",
    "tests/backend/engine/test_glide_gpu.py",
    "tests/backend/engine/test_drafts_gpu.py",
    "tests/backend/engine/test_engine_gpu.py",
    "tests/backend/engine/test_families_gpu.py",
    "tests/backend/engine/test_grammars_gpu.py",
    "tests/backend/engine/test_host_layers_gpu.py",
    "tests/backend/engine/test_host_tier_gpu.py",
    "tests/backend/engine/test_kv_cache_gpu.py",
    "tests/backend/engine/test_lookup_gpu.py",
    "tests/backend/engine/test_output_drafts_gpu.py",
    "tests/backend/engine/test_pipeline_gpu.py",
    "tests/backend/engine/test_pooling_gpu.py",
    "tests/backend/engine/test_prefix_gpu.py",
    "tests/backend/engine/test_sessions_gpu.py",
    "tests/backend/engine/test_shadow_gpu.py",
    "tests/backend/engine/test_step_kernels_gpu.py",
    "tests/backend/engine/test_tensor_ranks_gpu.py",
    "tests/backend/engine/test_top_log_probs_gpu.py",
    "tests/backend/models/test_quantized_gpu.py",
    "tests/reliability/test_gpu_rank_faults.py",
    "tests/tools/train_draft/test_train_draft_gpu.py",
)


def run_tests(paths: Sequence[str] = GPU_TESTS, marker: str = "gpu", workers: int = 0) -> dict[str, object]:
    """Return pytest's exit status and last line, counts of outcomes per file, and the names of failed tests.

    workers: processes of pytest-xdist; 0: without it.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", *paths]
    command += ["-n", str(workers)] if workers else []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "tests.xml"
        options = [f"--junitxml={results}", "-o", "junit_family=xunit1"]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        files, failed = count_results(results) if results.exists() else ({}, [])
    lines = [line for line in done.stdout.splitlines() if line.strip() and "generated xml file" not in line]
    print("\n".join(lines[-12:]), flush=True)
    return {
        "command": " ".join(command[1:]),
        "status": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-500:],
        "files": files,
        "failed": failed,
    }


def count_results(path: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Read pytest's JUnit file: return file -> outcome -> number of tests, and the names of failed tests."""
    files: dict[str, dict[str, int]] = {}
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file") or case.get("classname") or case.get("name") or ""
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if outcome == "failed":
            failed.append(f"{file}::{case.get('name')}")
        counts = files.setdefault(file, {})
        counts[outcome] = counts.get(outcome, 0) + 1
    return files, failed


def run_benchmarks(operations: list[str]) -> list[dict[str, object]]:
    rig, records = Rig(), []
    for operation in operations:
        started = time.monotonic()
        for result in OPERATIONS[operation](rig):
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
    parser.add_argument("--workers", type=int, default=0, help="test processes (pytest-xdist); default: one")
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS), help=f"of {', '.join(OPERATIONS)}")
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "command": "python " + typed(["tools/bench/gpu_report.py", *sys.argv[1:]]),
        **describe(),
    }
    report["tests"] = run_tests(workers=arguments.workers)
    report["benchmarks"] = run_benchmarks(arguments.operations)
    path = arguments.out / f"{datetime.date.today().isoformat()}-{arguments.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    if report["tests"]["status"]:  # type: ignore[index]
        sys.exit(1)


if __name__ == "__main__":
    main()
