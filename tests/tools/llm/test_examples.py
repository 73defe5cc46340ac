"""The examples of docs/guides/python.md, one after the other, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tridecode
from tests.checkpoints import save, tiny_llama
from tridecode.tools.build_repo.build import build_repo

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "python.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """The names that the first example defines."""
    folder = tmp_path_factory.mktemp("examples")
    checkpoint = save(tiny_llama(max_position_embeddings=512), folder / "tiny")
    (checkpoint / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    build_repo(str(checkpoint), folder / "models", parity=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        patch.chdir(folder)
        names: dict[str, Any] = {}
        exec(compile(EXAMPLES[0], str(PAGE), "exec"), names)
        yield names
        names["llm"].close()


def test_there_are_ten() -> None:
    assert len(EXAMPLES) >= 10 and "from tridecode import LLM" in EXAMPLES[0]


@pytest.mark.parametrize("number", range(1, len(EXAMPLES)))
def test_an_example_runs_and_prints(names, capsys, number) -> None:
    exec(compile(EXAMPLES[number], str(PAGE), "exec"), dict(names))
    assert capsys.readouterr().out.strip()


def test_every_name_of_the_package_is_there() -> None:
    assert all(getattr(tridecode, name).__doc__ for name in tridecode.__all__)
    with pytest.raises(AttributeError, match="module 'tridecode' has no attribute 'absent'"):
        tridecode.absent  # noqa: B018
