"""tests/prose.py: it finds what it refuses, and raises no false alarm."""

from __future__ import annotations

import pytest

from tests import prose


def found(tmp_path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return list(prose.findings(path))


@pytest.mark.parametrize(
    "text",
    [
        "# Of few rows a block takes each\n",
        "x = 1  # as it was\ny = 2  # To the cache\n",
        "#: Where a rank runs\nx = 1\n",
        'def f():\n    """Whether it fits."""\n',
        'class A:\n    """What a step\n    reads."""\n',
        "# the longest context for so many tokens\n",
        "# a folder that is no repository\n",
        "# nothing fails save for memory\n",
        "# tensors that are asked for\n",
        '"""Rows, of which some are padding."""\n',
        "# Until the server ends\n",
        'def f():\n    """How it ended."""\n',
        "# a row that goes on with the next token\n",
        "# the rank waits for ever\n",
        "# doors are told of the end\n",
        "# whoever reads it\n",
        "# a float in place of an integer\n",
        "# a file beside the weights\n",
        "# 5.3 ms a step\n",
        "# values, one a row\n",
        "# tokens that are on their way\n",
        "raise ValueError('beside the weights there are none')\n",
        "x = 1  # what the graph reads\n",
        "#: those with a real engine\nx = 1\n",
        "# keys are copied again and again\n",
        "# cuBLAS by way of torch\n",
        "# four a lane\n",
    ],
)
def test_a_headless_opening_and_an_idiom_are_found_in_python(tmp_path, text):
    assert len(found(tmp_path, "a.py", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "# the maximum of the row and the sum\n# Of few rows it is one line\nx = 1\n",
        'x = "# Of few rows"\n',
        'def f():\n    return """Whether it fits."""\n',
        "# Of 8 numbers\n# To_device\n",
        "# there is no such file, and it is no longer open\n",
        "# so much that it overflows\n",
        "# save the file\n",
        "# the answer goes on to the next door\n",
        "# in one thread\nx = 1\n",
        "x = 1  # whatever the graph reads\n",
        "# a row and\n# which of them is first\nx = 1\n",
        "# this value is no better than the other\n",
        "# from 64 tokens on, a row takes two blocks\n",
        "print('in place of')\n",
        "x = 1  # whether it fits\n",
    ],
)
def test_python_that_is_fine_raises_no_alarm(tmp_path, text):
    assert found(tmp_path, "a.py", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "int a;\n// Of a row\nint b;\n",
        "int a;  // By one thread\n",
        "/* What a block\n * reads. */\nint a;\n",
    ],
)
def test_an_opening_is_found_in_cuda(tmp_path, text):
    assert len(found(tmp_path, "a.cuh", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        'const char* a = "// Of a row";\n',
        "// Rows and sums\n// Of a row, in order\nint a;\n",
        "char a = '\"';\n",
    ],
)
def test_cuda_that_is_fine_raises_no_alarm(tmp_path, text):
    assert found(tmp_path, "a.cuh", text) == []


def test_a_page_is_checked_without_its_code(tmp_path):
    page = "Text of a\nfile beside the weights.\n\n- `in place of`\n- in [place of](x.md) it\n"
    assert found(tmp_path, "a.md", page) == [
        f'{tmp_path / "a.md"}:1: \'beside\', say "next to", "with" or "besides": '
        "'Text of a file beside the weights.'"
    ]
    assert found(tmp_path, "b.md", "There are\nno files.\n\n```\nfiles beside\n```\n") == []


def test_a_word_is_left_in_cuda(tmp_path):
    assert found(tmp_path, "a.cuh", "// a copy in place of a load\nint a;\n") == []
