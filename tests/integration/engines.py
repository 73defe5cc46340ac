"""A second engine next to the first one of a repository: the same weights at another degree."""

from __future__ import annotations

import re
from pathlib import Path

FIRST = "fastertransformer"


def add_engine(repository: Path, name: str, tensor: int, stages: int) -> None:
    """A copy of the model `fastertransformer` with an engine of its own."""
    folder = repository / name
    folder.mkdir()
    (folder / "1").symlink_to(Path("..") / FIRST / "1")
    text = (repository / FIRST / "config.pbtxt").read_text()
    for key, value in {
        "engine_model": name, "tensor_para_size": tensor, "pipeline_para_size": stages,
    }.items():  # fmt: skip
        before = rf'(key: "{key}" value: {{ string_value: )"[^"]*"'
        text, found = re.subn(before, rf'\g<1>"{value}"', text)
        assert found == 1, key
    text, found = re.subn(rf'(?m)^name: "{FIRST}"', f'name: "{name}"', text)
    assert found == 1
    (folder / "config.pbtxt").write_text(text)
