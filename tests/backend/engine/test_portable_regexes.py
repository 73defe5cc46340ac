"""Texts that regular expressions and grammars accept match for Python's `re`, too."""

from __future__ import annotations

import re

import pytest

from tests.backend.engine.byte_grammars import accepts, compiled, fault_of

#: letters, digits, marks, white space and controls, also ones that dialects judge differently
CHARACTERS = "a_Z9-, \t\n\x0b\x1f\x85\xa0²½éßﬁٰ٣੩\u2028\u3000\ufeffⅣ中\u200d\U0001e4f2\U00011f51😀"


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"\d",
            r"\w",
            r"\s",
            r"\D",
            r"\W",
            r"\S",
            r"[\w-]",
            r"[^\s,]",
            r"[^\W\d_]",
            r"[^\w]",
            r"[^\D]",
            r"[^\S\n]",
        ),
        *(r"[\s\S]", r"[]\d]", r"[^]\d]", r"\[\d\]", r"\\d", r"(?i)\d|A", r"[\d\s]{2}", r"(?P<y>\d)(?:-|$)"),
    ],
)
def test_classes_of_characters_are_those_of_python(pattern: str) -> None:
    """A match is one for Python, too; ASCII is decided alike."""
    python = re.compile(pattern)
    texts = [*CHARACTERS, *(a + b for a in "a9-_ \n" for b in CHARACTERS), "[9]", "\\d", "9-"]
    for matcher in (
        compiled("regex", pattern),
        compiled("grammar", f'start: A | "/"\n// \\w "\nA: /{pattern}/\n'),
    ):
        for text in texts:
            found, wanted = accepts(matcher, text), python.fullmatch(text) is not None
            assert found <= wanted, (pattern, text)
            assert found == wanted or not text.isascii() or set(text) & set("\x1f\x85"), (pattern, text)


def test_a_regular_expression_with_flags_of_its_own_dialect_stays_as_it_is() -> None:
    matcher = compiled("regex", r"(?x) \d \w  # [digit")
    assert [accepts(matcher, text) for text in ("9a", "9", "٣é")] == [True, False, True]


def test_a_backslash_at_the_end_of_a_regular_expression_is_refused() -> None:
    assert "the regular expression ends with a backslash" in fault_of("regex", "a\\\\\\")
    assert accepts(compiled("regex", "a\\\\"), "a\\")


def test_the_usual_beginning_of_a_grammar_in_lark_is_known() -> None:
    """Documentation of vLLM and Lark begins with `?start:`; EBNF begins with `root`."""
    text = '?start: sum\n?sum: NUMBER | sum "+" NUMBER -> add\nNUMBER: /\\d+/\n'
    assert [accepts(compiled("grammar", text), found) for found in ("1", "12+3", "1+")] == [True, True, False]
    assert "No 'root' rule found" in fault_of("grammar", 'start ::= "a"')


def test_a_choice_that_no_text_can_be_is_refused() -> None:
    assert fault_of("choice", '["a", "\\ud800"]').endswith("choice has a text that is not valid UTF-8")
    assert accepts(compiled("choice", '["a", "\\ud83d\\ude00"]'), "😀")
