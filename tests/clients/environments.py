"""A virtual environment of its own for each public client, kept between runs under .clients/.

An environment is named by what is installed into it: other requirements, another folder. One that pip could
not make in time is a reason in the table, never an exception.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

CPU_TORCH = "torch==2.13.0"  # avoids the CUDA build of 3 GB
_MARK = ".installed"
#: for FasterTransformer's programs, as docs/guides/clients.md has them: np.bool is in numpy until 1.23
FASTERTRANSFORMER = (
    "tritonclient[http,grpc]==2.50.0",
    "numpy==1.23.5",
    "transformers==4.57.6",
    "regex==2026.11.19",
    "tqdm==4.70.1",
    "pandas==2.0.3",
)


@dataclass(frozen=True)
class Environment:
    """Packages that pip or npm installs. package: the distribution whose version the table shows. beside:
    those whose version it shows in brackets. forced: distributions that are installed although their own
    requirements say otherwise. limit_s: for the installation."""

    package: str
    requirements: tuple[str, ...]
    limit_s: float = 600.0
    beside: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    npm: bool = False


ENVIRONMENTS = {
    "tritonclient": Environment("tritonclient", ("tritonclient[http,grpc]", "numpy<2")),
    "pytriton": Environment("nvidia-pytriton", ("nvidia-pytriton", "numpy<2")),
    "genai-perf": Environment("genai-perf", ("genai-perf==0.0.16", CPU_TORCH), 900.0),
    "aiperf": Environment("aiperf", ("aiperf==0.13.0",), 900.0),
    "litellm": Environment("litellm", ("litellm==1.110.2",)),
    # clients of the OpenAI service
    "openai": Environment("openai", ("openai==3.57.0",)),
    "openai-npm": Environment("openai", ("openai@7.57.0",), npm=True),
    "langchain-openai": Environment("langchain-openai", ("langchain-openai==1.7.4",), beside=("openai",)),
    "llama-index-openai": Environment(
        "llama-index-llms-openai-like", ("llama-index-llms-openai-like==0.8.1",), beside=("openai",)
    ),
    "instructor": Environment("instructor", ("instructor==1.17.0",), beside=("openai",)),
    "pydantic-ai": Environment("pydantic-ai-slim", ("pydantic-ai-slim[openai]==2.68.0",), beside=("openai",)),
    "lm-eval": Environment("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.24.0"), 900.0),
    "guidellm": Environment("guidellm", ("guidellm==0.8.1", CPU_TORCH), 900.0),
    "llama-index": Environment(
        "llama-index-llms-nvidia-triton",
        ("llama-index-llms-nvidia-triton",),
        beside=("llama-index-core",),
    ),
    "langchain": Environment(
        "langchain-nvidia-trt",
        ("langchain-nvidia-trt", "langchain-core<0.3"),
        beside=("langchain-core",),
    ),
    "langchain-newest": Environment(
        "langchain-nvidia-trt",
        ("langchain", "tritonclient[all]"),
        beside=("langchain-core",),
        forced=("langchain-nvidia-trt==0.0.1rc0",),
    ),
    # programs that come as source alone share one
    "programs": Environment("tritonclient", (*FASTERTRANSFORMER, "tabulate==0.10.0", CPU_TORCH), 900.0),
    "triton-cli": Environment(
        "tritonclient",
        ("tritonclient[http,grpc]", "directory-tree", "docker", "prometheus-client", "psutil", "rich")
        + ("huggingface-hub", "requests", "numpy<2"),
    ),
}

PERF_ANALYZER = "tritonclient==2.50.0"  # newer wheels hold a binary that needs glibc 2.38


@dataclass(frozen=True)
class Installed:
    """An environment that is there: its python and the package's version; or, in `failure`, why it is not.
    One of npm has a folder and no python."""

    python: Path | None = None
    version: str = ""
    failure: str = ""
    folder: Path | None = None

    @property
    def bin(self) -> Path:
        assert self.python is not None
        return self.python.parent


def install(name: str, cache: Path, refresh: bool = False) -> Installed:
    """The environment `name`, made where the cache does not have it. refresh: newest versions again."""
    wanted = ENVIRONMENTS[name]
    parts = (wanted.requirements + wanted.forced, sys.version_info[:2])
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    folder = cache / "environments" / f"{name}-{key}"
    if refresh or not (folder / _MARK).exists():
        shutil.rmtree(folder, ignore_errors=True)
        failure = _create_npm(folder, wanted) if wanted.npm else _create(folder, wanted)
        if failure:
            shutil.rmtree(folder, ignore_errors=True)
            return Installed(failure=failure)
        (folder / _MARK).touch()
    if wanted.npm:
        content = json.loads((folder / "node_modules" / wanted.package / "package.json").read_text())
        return Installed(version=content["version"], folder=folder)
    python = folder / "bin" / "python"
    versions = [_version(python, package) for package in (wanted.package, *wanted.beside)]
    others = ", ".join(map(" ".join, zip(wanted.beside, versions[1:])))
    return Installed(python, f"{versions[0]} ({others})" if others else versions[0], folder=folder)


def _create_npm(folder: Path, wanted: Environment) -> str:
    """Create the environment. Return why that failed; "" on success."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix"]
    return run_bounded([*command, str(folder), *wanted.requirements], time.monotonic() + wanted.limit_s)


def _create(folder: Path, wanted: Environment) -> str:
    """Create the environment. Return why that failed; "" on success."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wanted.limit_s
    failure = run_bounded([sys.executable, "-m", "venv", str(folder)], deadline)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    failure = failure or run_bounded([*pip, *wanted.requirements], deadline)
    return failure or (run_bounded([*pip, "--no-deps", *wanted.forced], deadline) if wanted.forced else "")


def run_bounded(command: list[str], deadline: float) -> str:
    left = deadline - time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0))
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} did not finish in time"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("WARNING:")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"{Path(command[0]).name} ended with {done.returncode}"])[-1].removeprefix(
        "ERROR: "
    )


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def perf_analyzer(cache: Path) -> tuple[Path | None, str]:
    """A script that runs perf_analyzer's binary with its two libraries, and, without one, why not.

    The binary is in a wheel of tritonclient; the libraries are in that of the server (nvidia-pytriton).
    """
    folder = cache / "perf_analyzer"
    script = folder / "perf_analyzer"
    if script.exists():
        return script, ""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", "manylinux1_x86_64", "--dest", str(folder), PERF_ANALYZER]
    failure = run_bounded(command, time.monotonic() + 300.0)
    if failure:
        return None, failure
    (wheel,) = folder.glob("tritonclient-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/bin/perf_analyzer")]
        binary = Path(archive.extract(member, folder))
    binary.chmod(0o755)
    libraries = _link_libraries(folder / "lib")
    if libraries:
        return None, libraries
    lines = ["#!/bin/sh", f'export LD_LIBRARY_PATH="{folder / "lib"}"', f'exec "{binary}" "$@"']
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return script, ""


def _link_libraries(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    held = next(iter(sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia_pytriton.libs"))), None)
    for wanted, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12.*")):
        found = sorted(held.glob(pattern)) if held else []
        if not found:
            return f"{wanted} is not in the wheel nvidia-pytriton"
        (folder / wanted).unlink(missing_ok=True)
        (folder / wanted).symlink_to(found[0])
    return ""
