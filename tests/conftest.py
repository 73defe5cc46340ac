"""Tests compute with the engine's own thread settings, whichever test loads torch first.

Options choose a part of the suite (tests/parts.py), and what is left to `make nightly` (tests/thinning.py).
The scheduler of pytest-xdist gives a process a file at a time. All files that use the server of the guide go
to one process, so that it is started once, and so do those that load the machine. Tests that share nothing
with their file go one at a time.
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
    """Put files with slow tests first, and tests that are handed out singly behind other slow ones, so that
    no process has a long file left when the others have ended."""
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
    """Exempt what imports and collection have made from the garbage collector: torch and transformers are a
    million objects, and many tests, and our own parity check, collect garbage."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("markexpr") == "gpu":
        return None  # they share no server: one by one, by xdist's own scheduler

    from xdist.scheduler import LoadScopeScheduling  # here: only where tests run on several processes

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if parts.is_single(parts.ROOT / file) else parts.group_of(file)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One server for all tests of the guide."""
    from tests.desk import open_desk  # loads torch: only where a test needs it

    with open_desk(tmp_path_factory.mktemp("desk")) as opened:
        yield opened
