"""One tiny repository for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.service import build_repository


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    return build_repository(tmp_path_factory.mktemp("reliability"), host_cache_bytes=32 << 20)
