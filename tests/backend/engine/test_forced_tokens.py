"""The drafts of one Constraint, their masks, and what they are worth in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.backend.engine.grammar_models import END, OTHER_END, PADDED_VOCAB, tokenizer_folder
from tests.backend.engine.test_plan_frame import verifying, with_part
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.constraint import Constraint
from tridecode.backend.engine.grammars.loading import load_grammars
from tridecode.backend.engine.grammars.matcher import GrammarFault, TokenMatcher
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.grammars.token_masks import allows, mask_of
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.wire.structured_output import StructuredOutput

WORDS = -(-PADDED_VOCAB // 32)
LIMIT_S = 5.0
SENTENCE = StructuredOutput("regex", "the ferry leaves at [0-9]{2} sharp")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = load_grammars(tokenizer_folder(), PADDED_VOCAB, [END, OTHER_END], 20.0, 1000.0)
    yield found
    found.close()


def begun(matcher: TokenMatcher, most: int = 15, ends: tuple[int, ...] = (END,), allowed=()) -> Constraint:
    constraint = Constraint(matcher, WORDS, [END, OTHER_END], ends, allowed, most)
    constraint.advance([], LIMIT_S)
    return constraint


def mask_at(matcher: TokenMatcher, tokens: list[int]) -> np.ndarray:
    mask, fresh = np.zeros(WORDS, np.int32), matcher.copy()
    fresh.accept(tokens)
    fresh.fill(mask)
    return mask


def ids_of(mask: np.ndarray) -> list[int]:
    return [token for token in range(PADDED_VOCAB) if allows(mask, token)]


def test_masks_behind_drafts_are_those_of_one_token_at_a_time(grammars: Grammars) -> None:
    matcher = grammars._compiler.compile(SENTENCE)
    constraint, tokens = begun(matcher, most=6), []
    while constraint.drafts:
        assert len(constraint.drafts) <= 6
        assert np.array_equal(constraint.mask, mask_at(matcher, tokens))
        for i, mask in enumerate(constraint.draft_masks, 1):
            assert np.array_equal(mask, mask_at(matcher, [*tokens, *constraint.drafts[:i]]))
        taken = constraint.drafts[: 1 + len(tokens) % 3]  # also some of them only
        tokens += taken
        constraint.advance(taken, LIMIT_S)
    assert len(tokens) == 16 and len(ids_of(constraint.mask)) > 1
    assert constraint.draft_masks.shape == (0, WORDS)


def test_the_last_token_of_a_complete_answer_is_no_draft_where_none_ends_it(grammars: Grammars) -> None:
    """The step that draws it ends the sequence; a row behind it would have no possible token."""
    output = StructuredOutput("choice", '["ferry"]')
    matcher = grammars._compiler.compile(output)
    every = begun(matcher).drafts
    constraint = begun(matcher, ends=())
    assert constraint.drafts == every[:-1] and len(every) > 3
    constraint.advance(every[:-1], LIMIT_S)
    assert constraint.drafts == [] and not constraint.is_over and ids_of(constraint.mask) == every[-1:]
    constraint.advance(every[-1:], LIMIT_S)
    assert constraint.is_over and constraint.error is None


def test_ends_and_ids_of_the_request_limit_the_masks_behind_drafts(grammars: Grammars) -> None:
    matcher = grammars._compiler.compile(SENTENCE)
    forced = begun(matcher).drafts
    excluded = forced[4]
    allowed = [token for token in range(PADDED_VOCAB) if token != excluded]
    constraint = begun(matcher, allowed=tuple(allowed))
    assert constraint.drafts == forced[: forced.index(excluded)], "a draft that its mask excludes"
    assert ids_of(constraint.draft_masks[-1]) == []
    whole = begun(grammars._compiler.compile(StructuredOutput("choice", '["ferry"]')), ends=(END,))
    assert ids_of(whole.draft_masks[-1]) == [END]


def test_a_request_without_drafts_does_not_look_ahead(grammars: Grammars) -> None:
    constraint = begun(grammars._compiler.compile(SENTENCE), most=0)
    assert constraint.drafts == [] and len(ids_of(constraint.mask)) == 1


class _Line:
    """A grammar of one text, 10 11 12 ... ; `fails` is a token behind which no mask can be computed, and
    each mask takes `seconds` of CPU time."""

    def __init__(self, fails: int = -1, seconds: float = 0.0, tokens: tuple[int, ...] = ()):
        self.fails, self.seconds, self.tokens, self.broken = fails, seconds, [*tokens], False

    def accept(self, tokens: list[int]) -> None:
        assert not self.broken, "a matcher with a fault is used again"
        self.tokens += tokens

    def fill(self, mask: np.ndarray) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        if self.tokens and self.tokens[-1] == self.fails:
            self.broken = True
            raise GrammarFault("too complex", "answer")
        mask[:] = mask_of([10 + len(self.tokens)], len(mask))

    def is_accepting(self) -> bool:
        return False

    def forced_tokens(self) -> list[int]:
        return [10 + i for i in range(len(self.tokens), 30)]

    def rollback(self, count: int) -> None:
        assert not self.broken
        del self.tokens[len(self.tokens) - count :]

    def copy(self) -> _Line:
        return _Line(self.fails, self.seconds, tuple(self.tokens))


def test_a_fault_behind_a_draft_ends_the_request_where_the_token_is_drawn() -> None:
    constraint = begun(_Line(fails=14))
    assert constraint.drafts == [10, 11, 12, 13] and constraint.error is None
    constraint.advance([10, 11], LIMIT_S)
    assert constraint.error is None and ids_of(constraint.mask) == [12]
    constraint.advance([12, 13], LIMIT_S)
    assert constraint.error is None and ids_of(constraint.mask) == [14]
    constraint.advance([14], LIMIT_S)
    assert isinstance(constraint.error, GrammarFault) and "too complex" in str(constraint.error)


def test_drafts_stop_at_the_limit_of_cpu_time_and_the_request_goes_on() -> None:
    constraint = Constraint(_Line(seconds=0.02), WORDS, [END], [END], (), 15)
    constraint.advance([], 0.05)
    assert 1 <= len(constraint.drafts) <= 4 and constraint.error is None
    assert len(constraint.draft_masks) == len(constraint.drafts)


@pytest.mark.parametrize(
    ("rows", "words", "size", "text"),
    [
        ([2], 3, 3, "wanted some of 2 that are verified"),
        ([1, 0], 3, 12, "ascending"),
        ([0, 0], 3, 18, "ascending"),
        ([], 3, 0, "ascending"),
        ([0], 3, 8, "has 32 bytes"),
        ([-1], 3, 9, ">= 0"),
    ],
)
def test_masks_of_drafts_that_do_not_fit_their_plan_are_refused(rows, words, size, text) -> None:
    frame = with_part(verifying(), "draft_masks", [rows, words, bytes(4 * size)])
    with pytest.raises(TridecodeError, match="from rank 0") as caught:
        plan_frame.decode(frame)
    assert text in str(caught.value)


def test_masks_of_drafts_arrive() -> None:
    masks = np.arange(12, dtype="<i4")
    frame = with_part(verifying(), "draft_masks", [[0, 1], 3, masks.tobytes()])
    (part,) = plan_frame.decode(frame).parts
    assert part.rows.tolist() == [0, 1] and part.masks.tolist() == masks.reshape(4, 3).tolist()
    assert plan_frame.decode(plan_frame.encode(plan_frame.decode(frame))).parts[0].masks.shape == (4, 3)
