"""Finding tritonserver and laying out what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.tools.serve.fakes import executable
from tridecode.backend.base.errors import ConfigError
from tridecode.tools.serve import triton_install


def fake_python(path: Path, **differences) -> str:
    """A python that answers triton_install's questions as told."""
    answer = {
        "path": str(path),
        "version": "3.11",
        "libdir": None,
        "numpy": "1.26.4",
        "missing": [],
        "pytriton": None,
        **differences,
    }
    return str(executable(path, f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n"))


@pytest.fixture
def no_server_on_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path / 'nothing'}:/usr/bin:/bin")


def test_the_wheel_is_laid_out_for_this_python(tmp_path, no_server_on_path):
    install = triton_install.prepare(tmp_path / "run")
    assert os.access(install.binary, os.X_OK) and install.binary.name == "tritonserver"
    backend = Path(install.arguments[install.arguments.index("--backend-directory") + 1]) / "python"
    stub = backend / "triton_python_backend_stub"
    assert stub.is_symlink(), "a copied stub does not find its libraries"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert stub.resolve().parent.name == version
    assert (backend / "libtriton_python.so").exists()
    assert (backend / "triton_python_backend_utils.py").exists()
    first = install.environment["PATH"].split(os.pathsep)[0]
    assert os.path.realpath(f"{first}/python3") == os.path.realpath(sys.executable)


def test_the_engine_keeps_its_own_python_and_paths(tmp_path, no_server_on_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/engine/lib")
    environment = triton_install.prepare(tmp_path / "run").environment
    assert environment["TRIDECODE_ENGINE_PYTHON"] == sys.executable
    assert environment["TRIDECODE_ENGINE_PATH"] == os.environ["PATH"]
    assert environment["TRIDECODE_ENGINE_LD_LIBRARY_PATH"] == "/engine/lib"
    assert environment["LD_LIBRARY_PATH"].endswith("/engine/lib")


def test_a_python_without_a_python3_beside_it_gets_a_link(tmp_path, no_server_on_path):
    python = fake_python(tmp_path / "bin" / "python-of-doors")
    environment = triton_install.prepare(tmp_path / "run", python).environment
    first = environment["PATH"].split(os.pathsep)[0]
    assert (Path(first) / "python3").resolve() == Path(python)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ({"numpy": "2.1.0"}, r"numpy 2\.1\.0.*numpy < 2.*python3\.11 -m venv.*--door-python"),
        ({"version": "3.99"}, r"stubs for 3\.10, 3\.11.*is 3\.99"),
        ({"version": "3.9"}, r"is 3\.9; wanted 3\.10 or later.*--door-python"),
        ({"missing": ["tridecode.backend"]}, "cannot import tridecode.backend.*pip install tridecode"),
    ],
)
def test_an_unfit_door_python_is_refused_with_the_fix(tmp_path, no_server_on_path, differences, said):
    python = fake_python(tmp_path / "python", **differences)
    with pytest.raises(ConfigError, match=said):
        triton_install.prepare(tmp_path / "run", python)


def test_a_door_python_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIDECODE_DOOR_PYTHON", "/no/such/python")
    with pytest.raises(ConfigError, match="/no/such/python cannot be run.*TRIDECODE_DOOR_PYTHON"):
        triton_install.prepare(tmp_path / "run")


def test_a_server_on_path_is_used_with_its_own_backends_if_its_stub_fits(tmp_path, monkeypatch):
    binary = executable(tmp_path / "triton" / "bin" / "tritonserver", "#!/bin/sh\n")
    stub = executable(
        tmp_path / "triton" / "backends" / "python" / "triton_python_backend_stub", "\0libpython3.10.so.1.0\0"
    )
    monkeypatch.setenv("PATH", f"{binary.parent}:/usr/bin:/bin")
    fitting = fake_python(tmp_path / "a" / "python3", version="3.10", numpy="2.1.0")
    install = triton_install.prepare(tmp_path / "run", fitting)
    assert install.binary == binary
    assert install.arguments == ("--backend-directory", str(stub.parent.parent))
    with pytest.raises(ConfigError, match=r"built for python 3\.10.*is 3\.11"):
        triton_install.prepare(tmp_path / "run", fake_python(tmp_path / "b" / "python3"))
