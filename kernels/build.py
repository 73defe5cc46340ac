"""Compile kernels/csrc into kernels/lib: `python -m tridecode.kernels.build [--arch 90|all|native]`.

The build needs only nvcc. Files are compiled in parallel, one per processor, and objects are cached by the
hash of their flags, their source and the headers that it includes. A kernel that spills registers fails the
build unless SPILLS names its file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES, OBJECTS, LIBRARY = HERE / "csrc", HERE / "lib" / "obj", HERE / "lib" / "libtridecode_kernels.so"
#: of a debug build, whose kernels limit their waits for each other (csrc/common/spin.cuh) and whose launches
#: are checked (csrc/common/debug.cu); library.py loads it with TRIDECODE_KERNELS=debug
DEBUG_OBJECTS = HERE / "lib" / "debug" / "obj"
DEBUG_LIBRARY = HERE / "lib" / "debug" / "libtridecode_kernels_debug.so"
API = SOURCES / "api"

#: targets of `--arch all`; the last one also as PTX, for later GPUs
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 103, 110, 120)
FLAGS = [
    "-O3",
    "-std=c++17",
    "-Xfatbin",
    "-compress-all",
    "-Xptxas",
    "-v",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
]
#: allowed bytes of spills, by file: known, and outside the hot loops
SPILLS = {
    "adapter_sums.cu": 24,
    "add_adapters.cu": 40,
    "gemm_mma.cu": 32,
    "gemm_packed_mma.cu": 36,
    "gemm_sm90_stream_k_adapted.cu": 64,
    "gemm_sm90_stream_k_kept.cu": 12,
    "gemm_sm90_stream_k_two_parts_adapted.cu": 64,
    "decode_attention.cu": 328,
    "decode_attention_8bit.cu": 64,
    "decode_several.cu": 376,
    "decode_limited.cu": 330,
    "prefill_split.cu": 40,
    "prefill_split_8bit.cu": 16,
    "prefill_split_limited.cu": 40,
    "prefill_split_limited_8bit.cu": 24,
    "gemm_sm90_split_k_8bit.cu": 16,
    "gemm_sm90_stream_k.cu": 16,
    "product_chain_sm90a.cu": 168,
    "sampling.cu": 8,
    "spread_adapters.cu": 48,
    "spread_adapters_norm.cu": 200,
    "verify.cu": 32,
}


class BuildError(RuntimeError):
    """A file that does not compile, or a kernel that spills registers or whose wgmma ptxas serialises."""


def nvcc() -> str:
    """Return the compiler's path: $NVCC, $CUDA_HOME/bin/nvcc or the one on the PATH. Raises BuildError."""
    candidates = [
        os.environ.get("NVCC"),
        os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc"),
        "nvcc",
    ]
    candidates.append("/usr/local/cuda/bin/nvcc")
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise BuildError(
        "nvcc is neither in $NVCC, $CUDA_HOME/bin nor on the PATH; it builds the kernels (CUDA 13)"
    )


def targets(arch: str) -> list[str]:
    """Return nvcc's -gencode arguments for "all", "native" or a number such as "90"."""
    if arch == "native":
        import torch

        major, minor = torch.cuda.get_device_capability()
        arch = f"{major}{minor}"
    if arch != "all":
        return [f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    return [*codes, f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]


def build(arch: str = "all", jobs: int | None = None, debug: bool = False) -> Path:
    """Compile what has changed, link, and return the library's path. BuildError holds the compiler's text.

    debug: build DEBUG_LIBRARY, whose kernels may spill registers and serialise wgmma.
    """
    started = time.monotonic()
    compiler, codes = nvcc(), targets(arch)
    folder, library = (DEBUG_OBJECTS, DEBUG_LIBRARY) if debug else (OBJECTS, LIBRARY)
    folder.mkdir(parents=True, exist_ok=True)
    files = sources("*.cu")
    info = f"arch {arch}, {_version(compiler)}, sources {source_hash()}{', debug' if debug else ''}"
    objects = {}
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        work = {
            pool.submit(_compile, compiler, path, _flags(path, codes, info, debug), folder): path
            for path in files
        }
        for count, done in enumerate(as_completed(work), 1):
            objects[work[done]] = done.result()
            _progress(count, len(files), work[done].name, time.monotonic() - started)
    command = [compiler, "-shared", *codes, "-o", str(library), *(str(objects[path]) for path in files)]
    _run(command, "link")
    for stale in set(folder.iterdir()) - set(objects.values()):
        stale.unlink()
    print(f"{library}: {library.stat().st_size / 1e6:.1f} MB, {info}, {time.monotonic() - started:.0f} s")
    return library


def sources(pattern: str = "*") -> list[Path]:
    """Return the files below csrc whose name matches, ordered by path."""
    return sorted(path for path in SOURCES.rglob(pattern) if path.is_file())


def source(name: str) -> Path:
    """Return the file below csrc with this name; names are unique across its folders."""
    (found,) = sources(name)
    return found


def api_header() -> str:
    """Return the C ABI: the text of all headers in csrc/api."""
    return "\n".join(path.read_text() for path in sorted(API.glob("*.h")))


def included(path: Path) -> list[Path]:
    """Return `path` and all files of csrc that it includes, also through others, ordered by path."""
    found, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            names = re.findall(r'^#include "(.+)"$', current.read_text(), re.MULTILINE)
            waiting += [SOURCES / name for name in names]
    return sorted(found)


def source_hash() -> str:
    """Return a hash of all files of csrc, twelve hex digits; library.py compares it with the library's."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _flags(path: Path, codes: list[str], info: str, debug: bool) -> list[str]:
    """Return the compiler's flags for one source."""
    flags = [*FLAGS, *codes]
    if "_sm90" in path.stem:
        flags = [*FLAGS, "-gencode=arch=compute_90a,code=sm_90a"]
    if path.name == "runtime.cu":
        flags.append(f'-DTRIDECODE_BUILD_INFO="{info}"')
    if debug:
        flags.append(f'-DTRIDECODE_DEBUG="{path.stem}"')
    return flags


def _compile(compiler: str, path: Path, flags: list[str], folder: Path) -> Path:
    """Return the object file of one source, compiled into `folder` unless it exists."""
    made = folder / f"{path.stem}-{_object_hash(path, flags)}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}.tmp.o")
        report = _run([compiler, *flags, f"-I{SOURCES}", "-c", str(path), "-o", str(partial)], path.name)
        if folder == OBJECTS:  # the limits of waits take registers
            _check_spills(path.name, report)
            _check_serialised(path.name, report)
        partial.rename(made)
    return made


def _object_hash(path: Path, flags: list[str]) -> str:
    """Return a hash of what an object depends on; it is equal in every copy of the project."""
    digest = hashlib.sha256(repr(flags).encode())
    for file in included(path):
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _check_spills(name: str, report: str) -> None:
    """Raise BuildError if ptxas reports more spilled bytes for sm_90 than SPILLS allows."""
    for kernel, stored in re.findall(
        r"Compiling entry function '(\S+)' for 'sm_90a?'.*?(\d+) bytes spill stores", report, re.DOTALL
    ):
        if int(stored) > SPILLS.get(name, 0):
            raise BuildError(
                f"{name}: {kernel} spills {stored} bytes of registers; allowed {SPILLS.get(name, 0)}"
            )


def _check_serialised(name: str, report: str) -> None:
    """Raise BuildError if ptxas reports serialised wgmma instructions (warnings C7510 to C7514)."""
    found = re.search(r".*\bC751[0-4]\b.*", report)
    if found:
        raise BuildError(f"{name}: ptxas serialises wgmma instructions: {found[0].strip()}")


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{what}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _version(compiler: str) -> str:
    found = re.search(r"release ([\d.]+)", _run([compiler, "--version"], "nvcc"))
    return f"nvcc {found.group(1)}" if found else "nvcc"


def _progress(done: int, total: int, name: str, seconds: float) -> None:
    bar = "#" * (30 * done // total)
    end = "\n" if done == total or not sys.stderr.isatty() else ""
    print(f"\r[{bar:<30}] {done}/{total} {name:<28} {seconds:5.0f} s", end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="all", help="all (default), native, or a number such as 90")
    parser.add_argument(
        "--jobs", type=int, help="files compiled in parallel; default: the number of processors"
    )
    parser.add_argument("--debug", action="store_true", help="limit waits between blocks, check launches")
    arguments = parser.parse_args()
    try:
        build(arguments.arch, arguments.jobs, arguments.debug)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
