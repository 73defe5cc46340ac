"""Streams other than that of the steps. Kernels whose blocks wait for each other run in the steps' stream
alone: two of them at once could each keep blocks of the other from starting. Kernels of other streams must
end by themselves (docs/design/adding_an_operation.md).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridecode.kernels.build import source

ROOT = Path(__file__).parents[3]

#: files that open a stream, and what runs in it
SIDE_STREAMS = {
    "backend/engine/adapters/upload.py": "copies from pinned memory",
    "backend/engine/device/file_weights.py": "copies from pinned memory, before the first step",
    "backend/engine/device/late_masks.py": "copies of masks; torch's write to their slots",
    "backend/engine/host_tier/store.py": "copies of blocks; torch's gather and sums; place_blocks",
    "kernels/peer_sums.py": "copies of rows to the other tensor rank",
}
#: functions of torch.cuda that make a stream, or make one current
OPENERS = {"Stream", "ExternalStream", "stream", "set_stream", "StreamContext"}
#: names by which code reaches the kernel library
LAUNCHERS = {"ops", "_ops", "gpu", "_gpu", "library", "_library", "Library", "Gpu", "Cuda", "Ops"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The modules of the engine: path from the root, and tree."""
    for folder in ("backend", "kernels", "model_repo_templates"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("kernels/bench/"):
                yield name, ast.parse(path.read_text())


def opened(tree: ast.Module) -> list[str]:
    """Return the calls that make a stream or make one current, as text; annotations do not count."""
    found = []
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in OPENERS:
            owner = called.value
            if isinstance(owner, ast.Attribute) and owner.attr == "cuda":
                found.append(ast.unparse(node))
    return found


def launched_elsewhere(tree: ast.Module) -> set[str]:
    """Return names of LAUNCHERS in the bodies of `with torch.cuda.stream(...)`, and in the functions of the
    module that these call, directly or not.
    """
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    pending: list[ast.AST] = [
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("cuda.stream(" in ast.unparse(item) for item in node.items)
        for statement in node.body
    ]
    seen: set[str] = set()
    names: set[str] = set()
    while pending:
        for node in ast.walk(pending.pop()):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            names.add(name)
            if name in defined and name not in seen:
                seen.add(name)
                pending.append(defined[name])
    return names & LAUNCHERS


def test_only_these_files_open_a_stream():
    assert {name for name, tree in modules() if opened(tree)} == set(SIDE_STREAMS)


@pytest.mark.parametrize("name", SIDE_STREAMS)
def test_no_kernel_of_ours_runs_in_a_stream_other_than_that_of_the_steps(name: str):
    assert launched_elsewhere(ast.parse((ROOT / name).read_text())) == set()


def test_the_only_kernel_of_ours_beside_steps_waits_for_no_block():
    """block_copies.py reaches the library for the host tier's stream."""
    text = (ROOT / "kernels/block_copies.py").read_text()
    assert set(re.findall(r"_library\.(\w+)\(", text)) == {"copy_columns", "place_blocks"}
    code = source("place_blocks.cu").read_text()
    assert '"common/spin.cuh"' not in code and "while (" in code
    assert not re.search(r"\bSpin\b|counters|partials|cluster", code)


def test_collectives_are_waited_for_in_the_stream_of_the_steps():
    """NCCL's kernels wait for other ranks, and would meanwhile hold multiprocessors that a step needs."""
    for name, tree in modules():
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        assert "async_op" not in keywords, name


@pytest.mark.parametrize(
    ("old", "new", "launchers"),
    [
        ("torch.index_select(tensor, 0, index, out=columns)", "self._gpu.gather(tensor)", {"_gpu"}),
        ("            self._copy(transfer, steps)\n", "            ops.linear(self._out)\n", {"ops"}),
    ],
)
def test_a_kernel_of_ours_in_such_a_stream_is_found(old: str, new: str, launchers: set[str]):
    """A method that is called there counts, too."""
    text = (ROOT / "backend/engine/host_tier/store.py").read_text()
    assert old in text
    assert launched_elsewhere(ast.parse(text.replace(old, new))) == launchers


def test_another_file_that_opens_a_stream_is_found():
    assert opened(ast.parse("side = torch.cuda.Stream(device)")) == ["torch.cuda.Stream(device)"]
    assert opened(ast.parse("def f(stream: torch.cuda.Stream | None) -> None: ...")) == []
