"""Applies the engine's thread settings before any test loads torch, and distributes tests to processes.

Options choose a part of the suite (tests/parts.py), and the tests left to `make nightly` (tests/thinning.py).
pytest-xdist's scheduler gives a process one file at a time. All files that use the server of the guide go to
one process, which starts it once; so do files that load the machine. Tests that share nothing with their file
are distributed singly.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import parts, thinning
from tridecode.backend.base.threads import spin_briefly

if TYPE_CHECKING:
    from tests.desk import Desk

LONG_S = 900  # limit of a nightly proof and of a test on a GPU; pyproject.toml has that of all others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=parts.PARTS, help="of the suite, see tests/parts.py; default: both")
    parser.addoption(
        "--nightly", choices=("leave", "only"), help="leave out, or run only, the tests of `make nightly`"
    )


def pytest_configure(config: pytest.Config) -> None:
    spin_briefly(os.environ)


def is_of_another_part(path: Path, config: pytest.Config) -> bool:
    part = config.getoption("--part")
    return bool(part) and parts.part_of(path) != part


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.is_file() and is_of_another_part(collection_path, config) else None


def is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether the item belongs to another part (pytest collects it if the command line names its
    file), or to the other side of --nightly."""
    nightly = config.getoption("--nightly")
    return is_of_another_part(item.path, config) or (
        bool(nightly) and (item.get_closest_marker("nightly") is not None) != (nightly == "only")
    )


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Put files with slow tests first, and singly distributed tests after other slow ones, so that no process
    still has a long file when the others have ended."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("nightly", "gpu")):
            item.add_marker(pytest.mark.timeout(LONG_S))
    thinning.thin(items)
    others = {item for item in items if is_left_out(item, config)}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    slow = {
        item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("server")
    }
    items.sort(key=lambda item: (item.path not in slow, parts.is_single(item.path)))


def pytest_collection_finish() -> None:
    """Exempt objects of imports and collection from the garbage collector: torch and transformers create a
    million objects, and many tests and our parity check collect garbage."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("markexpr") == "gpu":
        return None  # they share no server, so xdist's own scheduler distributes them one by one

    from xdist.scheduler import LoadScopeScheduling  # imported only if tests run on several processes

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if parts.is_single(parts.ROOT / file) else parts.group_of(file)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Start one server for all tests of the guide."""
    from tests.desk import open_desk  # loads torch, so it is imported only if a test needs it

    with open_desk(tmp_path_factory.mktemp("desk")) as opened:
        yield opened
