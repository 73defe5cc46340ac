"""Tensor ranks on one machine: the engine alone on one GPU and on several, and where a step's time goes.

    python -m tridecode.tools.bench.studies.ranks --gpus 2 --out FILE [--presets llama-3-8b,bloom-7b1]

For each preset, on the same machine: one GPU, all GPUs with sums through peer memory, and all GPUs through
NCCL (enable_custom_all_reduce = false). Each runs in its own process: ms/step, first tokens, and rank 0's
time by kernel class. Then the sum alone is measured (all_reduce.py). With --gpus 1 only the first runs. FILE
is written after each run, so that an early end loses no figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tridecode.tools.bench.engines import run_apart, steps
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.kernel_classes import CLASSES
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.reports.report import check_output, table, write_report

_WIDTH = 130  # width of the tables, even if the output is a file
_FIGURES = {"step_ms": "ms/step", "steady_step_ms": "steady", "first_token_ms": "first token ms"}


def jobs_of(job: Job, gpus: int) -> dict[str, Job]:
    """Return the jobs by name: one GPU, all GPUs through peer memory, all through NCCL."""
    whole = replace(job, tensor_para_size=gpus)
    several = {f"tp {gpus}": whole, f"tp {gpus}, NCCL": replace(whole, enable_custom_all_reduce=False)}
    return {"tp 1": replace(job, tensor_para_size=1), **(several if gpus > 1 else {})}


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the speed-up of each other run over "tp 1", by batch, without failed runs."""
    one = results.get("tp 1", {}).get("batches")
    if not one:
        return {}
    return {
        name: [round(first["step_ms"] / row["step_ms"], 3) for first, row in zip(one, found["batches"])]
        for name, found in results.items()
        if name != "tp 1" and "batches" in found
    }


def show(console: Console, preset: str, name: str, found: Mapping[str, Any]) -> None:
    if "error" in found:
        console.print(f"{preset}, {name}: {found['error']}", highlight=False, markup=False)
        return
    rows = [[row["batch"], *(row[key] for key in _FIGURES)] for row in found["batches"]]
    console.print(table(f"{preset}, {name}", ["sequences", *_FIGURES.values()], rows))
    parts = [*CLASSES, "bubbles", "step_us", "kernels"]
    found_steps = [[row["batch"], *map(row.get, parts)] for row in found.get("steps", [])]
    if found_steps:
        console.print(table(f"{preset}, {name}: us of a step of rank 0", ["sequences", *parts], found_steps))


def sum_alone(gpus: int) -> Any:
    """The figures of all_reduce.py, or {"error"}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "sums.json")
        command = [sys.executable, "-m", "tridecode.tools.bench.studies.all_reduce", "--ranks", str(gpus)]
        done = subprocess.run([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True)
        return json.loads(out.read_text()) if done.returncode == 0 else {"error": done.stderr[-2000:]}


def run(job: Job, presets: Sequence[str], gpus: int, out: Path) -> bool:
    """Measure, print and write; return whether all runs succeeded."""
    console, results = Console(width=_WIDTH), dict[str, Any]()
    settings = {
        "gpus": gpus,
        "batches": job.batches,
        "prompt_tokens": job.prompt_tokens,
        "output_tokens": job.output_tokens,
        "repeats": job.repeats,
    }
    for preset in presets:
        found = results[preset] = {}
        for name, one in jobs_of(replace(job, preset=preset), gpus).items():
            found[name] = run_apart(steps.ENGINE, one)
            show(console, preset, name, found[name])
            write_report(out, "ranks", settings, results)
        speedups = ratios(found)
        found["speedup"] = speedups
        for name, values in speedups.items():
            console.print(f"{preset}, {name}: {', '.join(map(str, values))} times as fast as tp 1")
    if gpus > 1 and job.device != "cpu":
        results["all_reduce"] = sum_alone(gpus)
    write_report(out, "ranks", settings, results)
    console.print(f"written: {out}", highlight=False, markup=False)
    runs = [one for found in results.values() for one in found.values() if isinstance(one, dict)]
    failed = [one for one in [*runs, results.get("all_reduce", {})] if "error" in one]
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="tensor_para_size of the longer runs")
    parser.add_argument("--presets", default="llama-3-8b,bloom-7b1")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: without timelines")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    check_output(given.out.parent)
    presets = given.presets.split(",")
    batches = tuple(int(part) for part in given.batches.split(","))
    sizes = dict(prompt_tokens=given.prompt_tokens, output_tokens=given.output_tokens, repeats=given.repeats)
    made = [make_job(preset, None, None, device=given.device, batches=batches, **sizes) for preset in presets]
    return 0 if run(made[0], presets, given.gpus, given.out) else 1


if __name__ == "__main__":
    sys.exit(main())
