"""How the engine's CPU threads wait, as libgomp itself reports it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tridecode.backend.engine import SPIN
from tridecode.tools.bench.measure import _environment


def spin_count(code: str, **environment: str) -> list[str]:
    given = {name: value for name, value in os.environ.items() if name != SPIN[0]}
    given.update(environment, OMP_DISPLAY_ENV="verbose")
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=120, check=True
    )
    return re.findall(rf"{SPIN[0]} = '(\d+)'", done.stderr)


def test_threads_of_the_engine_process_spin_briefly() -> None:
    found = spin_count("import tridecode.backend.engine.__main__")
    if not found:
        pytest.skip("this torch does not use libgomp")
    assert set(found) == {SPIN[1]}
    assert set(spin_count("import tridecode.backend.engine.__main__", GOMP_SPINCOUNT="77")) == {"77"}


def test_other_engines_are_measured_as_they_come(monkeypatch) -> None:
    monkeypatch.setenv(*SPIN)
    assert _environment("tridecode.tools.bench.engine")[SPIN[0]] == SPIN[1]
    assert SPIN[0] not in _environment("tridecode.tools.bench.transformers_bench")
    monkeypatch.setenv(SPIN[0], "77")  # the user's own
    assert _environment("tridecode.tools.bench.transformers_bench")[SPIN[0]] == "77"
