"""`import tridecode`, `tridecode --version` and finding a checkpoint that is converted are quick."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from tridecode.tools.build_repo.cache import Conversion, RepositoryCache

HEAVY = {"torch", "transformers", "numpy", "zmq", "httpx", "rich", "tokenizers", "tritonclient", "mpi4py"}
#: seconds; the best of RUNS counts, and a loaded machine is several times slower
IMPORT_S, VERSION_S, FIND_S, RUNS = 0.1, 1.5, 1.0, 5


def import_seconds() -> float:
    """Return how long `import tridecode` takes, without the start of Python."""
    program = "import time; began = time.perf_counter(); import tridecode; print(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def version_seconds() -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "tridecode.tools.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"tridecode \d+\.\d+\.\d+\S*\n", done.stdout)
    return time.perf_counter() - began


def test_the_import_takes_a_tenth_of_a_second_at_most() -> None:
    assert min(import_seconds() for _ in range(RUNS)) <= IMPORT_S


def test_the_version_is_printed_at_once() -> None:
    assert min(version_seconds() for _ in range(RUNS)) <= VERSION_S


def test_the_version_needs_no_heavy_module() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['tridecode', '--version']\n"
        "try:\n"
        "    runpy.run_module('tridecode.tools.cli', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_a_converted_checkpoint_is_found_without_reading_its_weights(tmp_path: Path) -> None:
    with open(tmp_path / "model.gguf", "wb") as file:
        file.truncate(1 << 30)
    built: list[Path] = []

    def build(source: str, output: Path, conversion: Conversion) -> None:
        output.mkdir()
        built.append(output)

    def find() -> float:
        began = time.perf_counter()
        cache = RepositoryCache(tmp_path / "cache", 10**12)
        found, _ = cache.find_or_build(tmp_path / "model.gguf", Conversion(), build)
        assert found == built[0]
        return time.perf_counter() - began

    find()  # reads the file once
    assert min(find() for _ in range(RUNS)) <= FIND_S and len(built) == 1
