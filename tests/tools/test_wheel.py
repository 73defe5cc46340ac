"""The wheel: what it carries, for which system it is, and that the package works from it alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.checkpoints import save, tiny_llama

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "converters", "kernels", "model_repo_templates", "tools")
#: files for readers of the repository: results, manifests for schedulers
NOT_CARRIED = re.compile(r"tools/(bench/results|deploy/(kubernetes|slurm))/|kernels/lib/obj/")


def tracked() -> set[str]:
    """Files of the packages, those included that git does not know yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def build(folder: Path, library: bytes | None) -> Path:
    """Build the wheel of a copy of the sources, as `python -m build --no-isolation` does; return its path.

    library: stands for the compiled kernels; None: they are not compiled.
    """
    copy, dist = folder / "copy", folder / "dist"
    for name in [*tracked(), "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    if library is not None:
        (copy / "kernels" / "lib" / "obj").mkdir(parents=True)
        (copy / "kernels" / "lib" / "libtridecode_kernels.so").write_bytes(library)
        (copy / "kernels" / "lib" / "obj" / "x.o").write_bytes(b"x")
    code = "import sys\nfrom setuptools import build_meta\nprint(build_meta.build_{}(sys.argv[1]))"
    dist.mkdir()
    for what in ("sdist", "wheel"):
        command = [sys.executable, "-c", code.format(what), str(dist)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        if what == "sdist":  # the wheel is made from it alone
            (archive,) = dist.glob("*.tar.gz")
            shutil.unpack_archive(archive, folder / "unpacked", filter="data")
            (copy,) = (folder / "unpacked").iterdir()
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_has_all_that_the_packages_have(tmp_path: Path) -> None:
    wheel = build(tmp_path, None)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"tridecode/{name}" for name in tracked() if not NOT_CARRIED.search(name)}
    wanted -= {"tridecode/backend/__init__.py"} - names
    wanted = {name for name in wanted if name != "tridecode/tools/package/__init__.py"}
    assert names == wanted | {"tridecode/__init__.py"}


@pytest.mark.slow
def test_a_wheel_with_the_library_is_for_this_system(tmp_path: Path) -> None:
    wheel = build(tmp_path, b"\x7fELF")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tridecode/kernels/lib/libtridecode_kernels.so" in names
    assert not [name for name in names if name.endswith(".o")]


@pytest.mark.nightly
@pytest.mark.server
def test_the_demonstration_runs_from_the_wheel(tmp_path: Path) -> None:
    """Dependencies are those of this environment; `make wheel-test` installs them for each Python."""
    wheel = build(tmp_path, None)
    home, work = tmp_path / "env", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=300)
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    # .pth files of the folder that one names, such as that of this checkout, are not read
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    where = "import tridecode; print(tridecode.__file__)"
    done = subprocess.run([python, "-c", where], env=environment, cwd=work, capture_output=True, text=True)
    assert done.stdout.startswith(str(home)), done
    command = [str(home / "bin" / "tridecode"), "demo", "--model", str(checkpoint)]
    command += ["--prompt", "The history of", "--max-tokens", "5"]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "5 tokens; ended by its length" in done.stderr, done
