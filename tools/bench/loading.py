"""`tridecode bench loading`: the time from weight files to a ready engine, and the memory that it frees.

The files have a preset's shape and random numbers. They are read once before the first load, so each load
reads from the page cache. Each load runs in its own process, like the server's engine; the last process exits
with its engine loaded, the others drop the engine and report the memory that remains.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import choose_device, resolve
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.models import read_model_config
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.bench.shapes.presets import preset as find_preset
from tridecode.tools.bench.shapes.random_files import weight_bytes, write_random_files
from tridecode.tools.progress import spinner

_READERS = 8  # threads, as many as the loader has
_READ_BYTES = 16 << 20
_MARGIN = 1.05  # factor of the files' bytes that the disk must have free
_HELD: list[Engine] = []  # engines of a process that ends with its engine loaded


def run_loading(
    preset: str, dtype: str | None, device: str, loads: int, folder: Path | None, output: Path
) -> None:
    """Write, load `loads` times (two or more), print, and write loading-<preset>.json.

    folder: where the weight directory is made and removed again; None: the system's for temporary files.
    Raises ConfigError where it has no room, TridecodeError where a load fails.
    """
    chosen = find_preset(preset)
    model = replace(chosen.model, weight_dtype=dtype or chosen.dtype)
    with tempfile.TemporaryDirectory(prefix="tridecode-", dir=folder) as root:
        _demand_room(Path(root), weight_bytes(model))
        directory = Path(root) / "weights"
        with spinner(f"writing {weight_bytes(model) / 1e9:.2f} GB") as say:
            started = time.perf_counter()
            size = write_random_files(directory, model)
            written_s = round(time.perf_counter() - started, 3)
            results = measure_loading(directory, device, loads, say)
    results = {"bytes": size, "written_s": written_s, **results}
    _show(f"{preset} {model.weight_dtype}, random numbers, {size / 1e9:.2f} GB in files", results)
    settings = {"preset": preset, "dtype": model.weight_dtype, "device": device, "loads": loads}
    path = write_report(output / f"loading-{preset}.json", "loading", settings, results)
    Console().print(f"wrote {path}", highlight=False)


def _demand_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size * _MARGIN:
        raise ConfigError(f"{folder.parent} has {free:,} bytes free; the weights need {size:,} (--folder)")


def measure_loading(directory: Path, device: str, loads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """{"read", "loads", "median", "device_used"}: load_once of each load, and the device memory in use before
    the first and after the last process.
    """
    say("reading the files once")
    read = read_files(directory)
    before = _apart(device_used, device)
    found = []
    for number in range(1, loads + 1):
        say(f"load {number} of {loads}")
        found.append(_apart(load_once, str(directory), device, number < loads))
    say("measuring the memory")
    after = _apart(device_used, device)
    figures = ("load_s", "weights_s", "rest_s", "bytes_per_s")
    median = {key: round(statistics.median(one[key] for one in found), 3) for key in figures}
    return {
        "read": read,
        "loads": found,
        "median": median,
        "device_used": {"before": before, "after_the_last_process": after},
    }


def read_files(directory: Path) -> dict[str, float]:
    """Read every weight file, several in parallel: {"seconds", "bytes_per_s"}."""
    files = sorted(directory.glob("*.bin"), key=lambda path: -path.stat().st_size)
    started = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        size = sum(pool.map(_read_file, files))
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 3), "bytes_per_s": round(size / seconds)}


def _read_file(path: Path) -> int:
    buffer, size = bytearray(_READ_BYTES), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
    return size


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own, which has ended on return."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise TridecodeError(f"the process of {function.__name__} died; see its output") from None


def load_once(directory: str, device: str, drop: bool) -> dict[str, Any]:
    """Load once with the server's settings; return seconds, and memory before, after, and when the engine is
    dropped.

    weights_s: until the model takes its last tensor, so reading, copying to the device and transposing;
    rest_s: buffers, cache, warm-up and the capture of graphs. drop: drop the engine; otherwise it is held
    until the process ends.
    """
    path = Path(directory)
    model = read_model_config(path)
    config = EngineConfig(data_type=model.weight_dtype, device=device)
    where = choose_device(config)
    memory, last_request = {"before": memory_used(where)}, [0.0]
    started = time.perf_counter()

    def progress(name: str) -> None:
        last_request[0] = time.perf_counter()

    engine = load_engine(path, model, resolve(config, model, where), SingleRank(), where, progress)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    load_s, weights_s = time.perf_counter() - started, last_request[0] - started
    memory["loaded"] = memory_used(where)
    cache_bytes = sum(cache.blocks.nbytes for cache in engine.state.caches)
    if drop:
        del engine
        memory["dropped"] = _after_dropping(where)
    else:
        _HELD.append(engine)
    size = sum(file.stat().st_size for file in path.glob("*.bin"))
    return {
        "device": str(where),
        "load_s": round(load_s, 3),
        "weights_s": round(weights_s, 3),
        "rest_s": round(load_s - weights_s, 3),
        "bytes_per_s": round(size / weights_s),
        "cache_bytes": cache_bytes,
        "memory": memory,
    }


def _after_dropping(device: torch.device) -> dict[str, int | None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc holds gigabytes of freed memory
        libc.malloc_trim(0)
    return memory_used(device)


def memory_used(device: torch.device) -> dict[str, int | None]:
    """Bytes in use: on the device, by all processes; of torch's tensors here; of this process' host memory.
    The first two are None on a CPU.
    """
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return {"device": None, "tensors": None, "process": resident}
    free, total = torch.cuda.mem_get_info(device)
    return {"device": total - free, "tensors": torch.cuda.memory_allocated(device), "process": resident}


def device_used(device: str) -> int | None:
    """memory_used of the device, in a process that has not used it before."""
    return memory_used(choose_device(EngineConfig(device=device)))["device"]


# ---------------------------------------------------------------- printing


def _show(title: str, results: dict[str, Any]) -> None:
    console = Console()
    columns = ["", "load s", "weights s", "GB/s", "rest s"]
    rows = [_seconds(f"load {number}", one) for number, one in enumerate(results["loads"], start=1)]
    rows.append(_seconds("median", results["median"]))
    rows.append(
        ["reading alone", None, results["read"]["seconds"], results["read"]["bytes_per_s"] / 1e9, None]
    )
    console.print(table(title, columns, rows))
    console.print(table("memory, GiB", ["", "device", "tensors", "process"], _memory_rows(results)))
    console.print(
        f"The files were written in {results['written_s']:.1f} s and read once before: they are in the page "
        "cache.",
        highlight=False,
    )


def _seconds(name: str, one: dict[str, Any]) -> list[Any]:
    return [name, one["load_s"], one["weights_s"], one["bytes_per_s"] / 1e9, one["rest_s"]]


def _memory_rows(results: dict[str, Any]) -> list[Sequence[Any]]:
    """Return the memory rows of the first load, which drops its engine, and of the processes before and after
    all loads.
    """
    first, used = results["loads"][0], results["device_used"]
    memory = [
        [key, *(_gib(first["memory"][key][kind]) for kind in ("device", "tensors", "process"))]
        for key in ("before", "loaded", "dropped")
    ]
    return [
        ["before the first process", _gib(used["before"]), None, None],
        *memory,
        ["after the last process", _gib(used["after_the_last_process"]), None, None],
        ["the cache, while loaded", None, _gib(first["cache_bytes"]), None],
    ]


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30
