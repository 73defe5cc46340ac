"""Tests compute with the engine's own thread settings, whichever test loads torch first.

The two parts of the suite (tests/parts.py), and how the first one is spread over processes: a file at a time,
and all files that use the server of the guide together, so that it is started once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import parts
from tridecode.backend.base.threads import spin_briefly

if TYPE_CHECKING:
    from tests.desk import Desk


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=parts.PARTS, help="of the suite, see tests/parts.py; default: both")


def pytest_configure(config: pytest.Config) -> None:
    spin_briefly(os.environ)


def is_of_another_part(path: Path, config: pytest.Config) -> bool:
    part = config.getoption("--part")
    return bool(part) and parts.part_of(path) != part


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.is_file() and is_of_another_part(collection_path, config) else None


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Files with slow tests come first, so that no process is left with one when the others have ended."""
    others = {item for item in items if is_of_another_part(item.path, config)}
    if others:  # of files that the command line names: pytest collects them in any case
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    slow = {
        item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("server")
    }
    items.sort(key=lambda item: item.path not in slow)


@functools.cache
def group_of(file: str) -> str:
    """The tests of a group run in one process."""
    return "desk" if "desk: Desk" in (parts.ROOT / file).read_text(encoding="utf-8") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("markexpr") == "gpu":
        return None  # they share no server: one by one, by xdist's own scheduler

    from xdist.scheduler import LoadScopeScheduling  # here: only where tests run on several processes

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return ByFile(config, log)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One server for all tests of the guide."""
    from tests.desk import open_desk  # loads torch: only where a test needs it

    with open_desk(tmp_path_factory.mktemp("desk")) as opened:
        yield opened
