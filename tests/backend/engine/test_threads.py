"""The wait policy of the engine's CPU threads, as reported by libgomp."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tridecode.backend.base.threads import SPIN
from tridecode.backend.supervisor.launch import engine_environment
from tridecode.tools.bench import engines
from tridecode.tools.bench.engines import ours, transformers


def spin_count(environment: dict[str, str]) -> list[str]:
    """The values that libgomp reports in a process that loads torch."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return re.findall(rf"{SPIN[0]} = '(\d+)'", done.stderr)


def test_threads_of_the_engine_process_spin_briefly(monkeypatch) -> None:
    monkeypatch.delenv(SPIN[0], raising=False)
    found = spin_count(engine_environment())
    if not found:
        pytest.skip("this torch does not use libgomp")
    assert set(found) == {SPIN[1]}
    monkeypatch.setenv(SPIN[0], "77")  # the user's own
    assert set(spin_count(engine_environment())) == {"77"}


def test_loading_the_engine_leaves_the_environment_alone() -> None:
    code = "import os; before = dict(os.environ); import tridecode.backend.engine.device.engine\n"
    code += "import tridecode.tools.cli\n"
    code += "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    environment = {name: value for name, value in os.environ.items() if name != SPIN[0]}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=True)


def test_other_engines_are_measured_with_their_own_defaults(monkeypatch) -> None:
    monkeypatch.setenv(*SPIN)
    assert engines.engine_environment(ours.ENGINE)[SPIN[0]] == SPIN[1]
    assert SPIN[0] not in engines.engine_environment(transformers.ENGINE)
    monkeypatch.setenv(SPIN[0], "77")  # the user's own
    assert engines.engine_environment(transformers.ENGINE)[SPIN[0]] == "77"
    assert engines.engine_environment(ours.ENGINE)[SPIN[0]] == "77"
