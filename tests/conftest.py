"""Tests compute with the engine's own thread settings, whichever test loads torch first."""

from __future__ import annotations

import os

import pytest

from tridecode.backend.threads import spin_briefly


def pytest_configure(config: pytest.Config) -> None:
    spin_briefly(os.environ)
