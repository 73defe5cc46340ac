"""Measures the published figures, each in its own process, and collects them in one file.

    python -m tridecode.tools.bench.published run FOLDER [--only JOB ...] [--job-s SECONDS]
    python -m tridecode.tools.bench.published collect FOLDER FILE --commit COMMIT

`run` runs `tridecode bench` for each job, all by default, and writes its report, its output and its seconds
to FOLDER/JOB. Several runs may write to one folder: CUDA_VISIBLE_DEVICES gives each of them a card. A job
that fails is reported, and the others still run. The processes are forked from one that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.threads import spin_briefly

_W8A8 = "--quantization w8a8-int8 --kv-cache-dtype fp8"
_QUANTISED = {
    "w8a8": f"{_W8A8} --int8-head",
    "int8": "--quantization int8 --int8-head",
    "int4": "--quantization int4 --int8-head",
}
_FAMILIES = (
    "gpt-neox-20b", "gemma-3-4b", "gemma-2-9b", "qwen3-8b", "mistral-7b", "falcon-7b", "qwen2-7b",
    "phi-3-mini", "gpt-j-6b", "opt-6.7b", "mpt-7b", "baichuan2-7b",
)  # fmt: skip
_SMALL = ("gpt2", "bloom-560m")


def _steps(preset: str, options: str = "", batches: str = "1,8,64,256", tokens: int = 65) -> str:
    """Return the command that measures steps of several numbers of sequences."""
    return f"engine --preset {preset} {options} --batches {batches} --output-tokens {tokens} --repeats 1"


def _jobs() -> dict[str, str]:
    found, llama = {}, "llama-3-8b"
    for preset in (llama, "bloom-7b1"):
        found[preset] = _steps(preset)
        found |= {f"{preset}-{name}": _steps(preset, options) for name, options in _QUANTISED.items()}
        found[f"{preset}-tp2"] = _steps(preset, "--tp 2")
        found[f"{preset}-128"] = _steps(preset, tokens=128)
    for name in ("w8a8", "int4"):  # compared with vLLM
        found[f"{llama}-{name}-128"] = _steps(llama, _QUANTISED[name], tokens=128)
    found[f"{llama}-w8a8-fp8"] = _steps(llama, "--quantization w8a8-fp8 --int8-head")
    found[f"{llama}-int8-head-inputs"] = _steps(llama, "--int8-head-inputs", "256")
    found[f"{llama}-w8a8-int8-head-inputs"] = _steps(llama, f"{_W8A8} --int8-head-inputs", "256")
    found["chats"] = f"mix --preset {llama} --repeats 1"
    found["chats-w8a8"] = f"mix --preset {llama} {_QUANTISED['w8a8']} --repeats 1"
    found |= {preset: _steps(preset, batches="1,8,64") for preset in _FAMILIES}
    return found | {preset: _steps(preset, batches="1,2,3,4") for preset in _SMALL}


#: name -> arguments of `tridecode bench`
JOBS = _jobs()
#: figures of a number of sequences, and of a load
_FIGURES = (
    *("batch", "first_token_ms", "step_ms", "steady_step_ms", "roof_ms"),
    *("requests", "at_a_time", "output_tokens", "seconds", "tokens_per_s", "first_token_p50_ms"),
    *("first_token_p95_ms", "token_gap_p50_ms", "token_gap_p95_ms", "token_gap_p99_ms"),
    *("decode_steps", "decode_step_ms", "mixed_steps", "mixed_step_ms", "prompt_tokens_per_mixed_step"),
)


def run(folder: Path, names: list[str], job_s: float) -> list[str]:
    """Run jobs one after the other; each may take job_s seconds. Returns those that failed."""
    import tridecode.tools.bench.compare  # noqa: F401  so that no job has to import torch

    failed, began = [], time.monotonic()
    for name in names:
        home, started = folder / name, time.monotonic()
        home.mkdir(parents=True, exist_ok=True)
        process = multiprocessing.get_context("fork").Process(target=_bench, args=(name, home))
        process.start()
        group = process.pid or 0
        os.setpgid(group, group)  # with the job's other ranks
        try:
            process.join(job_s)
        finally:
            if process.is_alive():
                os.killpg(group, signal.SIGKILL)
                process.join()
        seconds = time.monotonic() - started
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        noted = {"status": process.exitcode, "seconds": round(seconds, 1), "cards": cards}
        (home / "run").write_text(json.dumps(noted))
        failed += [name] if process.exitcode else []
        end = f"status {process.exitcode}" if process.exitcode else " | ".join(_line(home))
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {seconds:.1f} s, {end}", flush=True)
    return failed


def _bench(name: str, home: Path) -> None:
    """Run `tridecode bench` in this process; its output goes to a file."""
    log = os.open(home / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    from tridecode.tools.cli import app

    arguments = ["bench", *shlex.split(JOBS[name])]
    sys.argv = ["tridecode", *arguments]  # the report's command
    app([*arguments, "--output", str(home)])


def _report(home: Path) -> dict[str, Any]:
    (path,) = home.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of a report: one row for each number of sequences, or of the load."""
    found = report["results"]["tridecode"]
    rows = found["batches"] if "batches" in found else [found["workload"]]
    return [{key: row[key] for key in _FIGURES if row.get(key) is not None} for row in rows]


def _line(home: Path) -> list[str]:
    """Return each row in short: the steady step and the first tokens, or the load's tokens per second."""
    return [
        f"{row['batch']}: {row.get('steady_step_ms', row['step_ms']):.3f}, {row['first_token_ms']:.0f}"
        if "batch" in row
        else f"{row['tokens_per_s']:.0f} tokens/s"
        for row in _rows(_report(home))
    ]


def collect(folder: Path, commit: str) -> dict[str, Any]:
    """Return one report of all jobs in `folder` that ended. Raises ConfigError if they ran on different
    kinds of cards or with different versions.
    """
    machines: list[dict[str, Any]] = []
    jobs = {}
    for name in JOBS:
        run_file = folder / name / "run"
        noted = json.loads(run_file.read_text()) if run_file.exists() else {"status": "not run"}
        if noted.pop("status") != 0:
            continue
        report = _report(folder / name)
        machine = {**report["environment"], "commit": commit}
        described = {"time": machine.pop("time"), "command": machine.pop("command").split(" --output ")[0]}
        jobs[name] = described | noted | {"rows": _rows(report)}
        if machine not in machines:
            machines.append(machine)
    if len(machines) != 1:
        raise ConfigError(f"{folder} has results of {len(machines)} machines or sets of versions; wanted 1")
    return {"kind": "published", "environment": machines[0], "jobs": jobs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running, collecting = commands.add_parser("run"), commands.add_parser("collect")
    for command in (running, collecting):
        command.add_argument("folder", type=Path)
    running.add_argument("--job-s", type=float, default=600.0, help="seconds after which a job is killed")
    running.add_argument("--only", nargs="+", metavar="JOB", default=list(JOBS), help=f"of {', '.join(JOBS)}")
    collecting.add_argument("file", type=Path)
    collecting.add_argument("--commit", required=True, help="of the measured tree")
    arguments = parser.parse_args()
    if arguments.command == "collect":
        report = collect(arguments.folder, arguments.commit)
        arguments.file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    if unknown := set(arguments.only) - set(JOBS):
        parser.error(f"no job {', '.join(sorted(unknown))}; wanted one of {', '.join(JOBS)}")
    spin_briefly(os.environ)  # before torch is loaded
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the job in flight too
    sys.exit(bool(run(arguments.folder, arguments.only, arguments.job_s)))


if __name__ == "__main__":
    main()
