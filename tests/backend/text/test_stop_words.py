"""Stop words are found at the same place for any division of the text into pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tridecode.backend.text.stop_words import StopAutomaton, StopMatcher


def run_matcher(words: list[str], parts: list[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(StopAutomaton(words)), ""
    for part in parts:
        text, stopped = matcher.push(part)
        out += text
        if stopped:
            return out, True
    return out + matcher.flush(), False


def first_complete(words: list[str], text: str) -> tuple[str, bool]:
    """Return the definition: the shortest prefix that ends with a word, without the longest such word."""
    for end in range(1, len(text) + 1):
        ending = [word for word in words if word and text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    words=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=4),
    parts=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12),
)
def test_a_stop_word_is_found_however_the_text_is_cut(words, parts):
    assert run_matcher(words, parts) == first_complete(words, "".join(parts))


def test_a_possible_beginning_of_a_stop_word_is_held_back():
    matcher = StopMatcher(StopAutomaton(["\n\nUser:"]))
    assert matcher.push("fine\n\nUs") == ("fine", False)
    assert matcher.push("age") == ("\n\nUsage", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.flush() == "\n"


def test_the_empty_stop_word_never_stops():
    assert run_matcher([""], ["a", "b"]) == ("ab", False)


def test_a_stop_word_can_be_shown_or_ignored_for_a_while():
    matcher = StopMatcher(StopAutomaton(["END", "NDX"]), shown=True)
    assert matcher.push("an END", check=False) == ("an ", False)  # "END" may still become "NDX"
    assert matcher.push("X rest") == ("ENDX", True)
    matcher = StopMatcher(StopAutomaton(["END"]), shown=True)
    assert matcher.push("EN", check=False) == ("", False)
    assert matcher.push("D.") == ("END", True)  # the word began in the ignored part and ends after it
