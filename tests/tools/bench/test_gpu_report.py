"""The GPU report runs every test that is marked for it, and counts them by file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tridecode.tools.bench.gpu_report import GPU_TESTS, ROOT, run_tests

MARKED = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", [1, 2, 3])
def test_good(n): pass

def test_bad(): assert False

@pytest.fixture
def broken(): raise OSError

def test_without_its_fixture(broken): pass

def test_later(): pytest.skip("no card")
"""


def test_every_file_with_the_marker_is_run() -> None:
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "pytest.mark.gpu" in path.read_text()]
    places = [ROOT / place for place in GPU_TESTS]
    left = [path for path in marked if not any(place in (path, *path.parents) for place in places)]
    assert len(marked) > 2 and [path for path in left if path.name != "test_gpu_report.py"] == []


@pytest.mark.nightly  # collects the whole suite; collection itself finds an unknown parameter
def test_every_marked_test_has_its_fixtures() -> None:
    """CI deselects these tests, so a parameter or fixture that is missing would be seen on a GPU only."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--setup-plan", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *GPU_TESTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_results_are_counted_by_file_and_failures_named(tmp_path, capsys) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "test_other.py").write_text("def test_it(): assert False\n")
    result = run_tests([str(tmp_path)])
    ((file, counts),) = result["files"].items()
    assert file.endswith("test_marked.py") and counts == {"passed": 3, "failed": 2, "skipped": 1}
    assert [name.rsplit("::")[-1] for name in result["failed"]] == ["test_bad", "test_without_its_fixture"]
    assert result["status"] == 1 and result["summary"].startswith("1 failed, 3 passed, 1 skipped")
    assert "test_bad" in capsys.readouterr().out


def test_tests_that_cannot_be_run_are_a_failure(tmp_path) -> None:
    (tmp_path / "test_broken.py").write_text("import absent_module_of_no_one\n")
    result = run_tests([str(tmp_path)])
    assert result["status"] and len(result["failed"]) == 1
