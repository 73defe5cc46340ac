"""Stop words in token ids, with the toy device: they end a row with the token that completes them."""

from __future__ import annotations

import pytest

from tests.backend.engine.toy_device import Run, expected, limits

PROMPT = [3, 4, 5]
SAID = expected(PROMPT, 8)


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "a step in flight"])
@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 8),
        ([[SAID[2]]], SAID.index(SAID[2]) + 1),
        ([SAID[1:3]], 3),
        ([[*PROMPT[1:], SAID[0]]], 1),  # it begins in the prompt
        ([[*PROMPT, *SAID[:2]]], 2),  # and has all of it
        ([PROMPT], 8),  # in the prompt alone it ends nothing
        ([PROMPT[1:], [5]], 8),
        ([[9, *PROMPT, SAID[0]]], 8),  # longer than what there is
        ([SAID[3:5], SAID[1:3]], 3),  # the first that is complete
    ],
)
def test_a_row_ends_with_the_token_that_completes_a_word(words: list, count: int, overlap: bool) -> None:
    assert 5 not in SAID  # or the words that end nothing would
    run = Run(limits(), overlap)
    run.submit(1, PROMPT, max_tokens=8, stop_words=words)
    run.finish()
    (end,) = run.ends[1, 0]
    assert run.tokens[1, 0] == SAID[:count]
    assert end.finish == ("length" if count == 8 else "stop_word")
