"""Events of an engine to text, without Triton; expected values come from `tokenizers` and str methods."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.doors.tokenizers_at_hand import byte_level, metaspace_unigram, sentencepiece_bpe
from tridecode.backend.text.completion import Answer, Completion, Piece
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.encoding import encode
from tridecode.backend.text.stop_words import StopAutomaton
from tridecode.backend.wire.messages import Event

KINDS = {"bytes": byte_level, "sentencepiece": sentencepiece_bpe, "unigram": metaspace_unigram}
END = {"bytes": "<|endoftext|>", "sentencepiece": "</s>", "unigram": "</s>"}
kinds = pytest.mark.parametrize("kind", KINDS)
PROMPT = "the quick"
TEXT = " brown fox 東京 😀 runs away. A stop word"


def log_prob(index: int) -> float:
    return -0.25 * (index + 1)  # sums are exact in binary


def engine_events(ids: list[int], cuts: list[int], finish: str) -> list[Event]:
    """Events for these tokens, cut at the given counts; the last one has `finish`."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    events = [
        Event(1, 0, tokens=ids[a:b], log_probs=[log_prob(i) for i in range(a, b)])
        for a, b in zip(bounds, bounds[1:])
    ]
    last = events[-1]
    return [*events[:-1], Event(1, 0, tokens=last.tokens, log_probs=last.log_probs, finish=finish)]


class Run:
    """One row through an Answer: its responses, and the number of cancels sent to the engine."""

    def __init__(self, kind: str, events: list[Event], stop: tuple[str, ...] = (), streamed=True, echo=""):
        tokenizer = KINDS[kind]()
        self.cancels = 0
        (prompt,) = encode(tokenizer, [PROMPT])
        row = Completion(TokenizerView(tokenizer, True), prompt, StopAutomaton(stop), self._cancel, echo)
        answer = Answer([row], streamed)
        self.pieces: list[Piece] = [group[0] for event in events for group in answer.pieces([(0, event)])]
        assert answer.finished
        assert answer.num_output_tokens == sum(piece.num_tokens for piece in self.pieces)

    def _cancel(self) -> None:
        self.cancels += 1

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def decoded_after_prompt(kind: str, ids: list[int]) -> str:
    tokenizer = KINDS[kind]()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    return tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))


def ids_of(kind: str, text: str) -> list[int]:
    return KINDS[kind]().encode(text, add_special_tokens=False).ids


@kinds
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab c東é😀\n", max_size=30), cuts=st.lists(st.integers(0, 60)))
def test_streamed_pieces_add_up_to_the_text_the_tokens_and_their_log_probs(kind, text, cuts):
    end = KINDS[kind]().token_to_id(END[kind])
    ids = [*ids_of(kind, text), end]
    run = Run(kind, engine_events(ids, cuts, "end_id"))
    assert run.text == decoded_after_prompt(kind, ids)
    assert [value for piece in run.pieces for value in piece.log_probs] == list(
        map(log_prob, range(len(ids)))
    )
    assert run.pieces[-1].cum_log_prob == sum(map(log_prob, range(len(ids))))
    assert [piece.finish_reason for piece in run.pieces] == [""] * (len(run.pieces) - 1) + ["stop"]
    if "\ufffd" not in run.text:
        assert not any("\ufffd" in piece.text for piece in run.pieces)
    assert run.cancels == 0


@kinds
@pytest.mark.parametrize("streamed", [True, False])
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 60)), stop=st.sampled_from(["fox", " fox", "n f", "away", "A stop"]))
def test_a_stop_word_ends_the_text_at_the_same_token_however_events_are_merged(kind, streamed, cuts, stop):
    ids = ids_of(kind, TEXT)
    run = Run(kind, engine_events(ids, cuts, "length"), ("never", stop), streamed)
    whole = decoded_after_prompt(kind, ids)
    assert run.text == whole[: whole.index(stop)]
    complete = next(n for n in range(len(ids) + 1) if stop in decoded_after_prompt(kind, ids[:n]))
    assert sum(piece.num_tokens for piece in run.pieces) == complete
    assert sum(len(piece.log_probs) for piece in run.pieces) == complete
    assert run.pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize(("cut", "cancels"), [(True, 1), (False, 0)])
def test_the_engine_is_told_to_stop_unless_it_has_ended_by_itself(cut, cancels):
    ids = ids_of("bytes", TEXT)
    found_at = next(n for n in range(len(ids) + 1) if "fox" in byte_level().decode(ids[:n]))
    assert Run("bytes", engine_events(ids, [found_at] * cut, "length"), ("fox",)).cancels == cancels


@pytest.mark.parametrize(
    ("finish", "reason", "shown"),
    [("end_id", "stop", 2), ("stop_word", "stop", 2), ("length", "length", 3), ("stopped", "abort", 3)],
)
def test_finish_reasons_and_whether_the_last_token_shows(finish, reason, shown):
    ids = ids_of("bytes", " fox runs away")[:3]
    run = Run("bytes", engine_events(ids, [], finish))
    assert (run.pieces[-1].finish_reason, run.pieces[-1].num_tokens) == (reason, 3)
    assert run.text == byte_level().decode(ids[:shown])


def test_an_incomplete_character_at_the_end_is_reported_as_such():
    ids = ids_of("bytes", "a😀")
    assert Run("bytes", engine_events(ids[:-1], [1, 2], "length")).text == byte_level().decode(ids[:-1])


def test_a_beginning_of_a_stop_word_is_shown_when_the_text_ends_in_it():
    run = Run("bytes", engine_events(ids_of("bytes", " the fo"), [1, 2], "length"), ("fox",))
    assert run.text == " the fo"


def test_a_whole_answer_is_one_piece_that_can_begin_with_its_prompt():
    run = Run("bytes", engine_events(ids_of("bytes", TEXT), [2, 3, 9], "length"), streamed=False, echo=PROMPT)
    assert [piece.text for piece in run.pieces] == [PROMPT + TEXT]


@pytest.mark.parametrize(
    ("streamed", "apart", "groups"),
    [
        (True, True, [[0], [1], [0], [1], [0]]),
        (False, True, [[1], [0]]),  # in the order in which they end
        (False, False, [[0, 1]]),
    ],
)
def test_rows_are_grouped_into_responses(streamed, apart, groups):
    view = TokenizerView(byte_level(), True)
    rows = [Completion(view, [], StopAutomaton(()), lambda: None) for _ in range(2)]
    answer = Answer(rows, streamed, apart)
    fox = ids_of("bytes", "fox")
    steps = [[(0, ""), (1, "")], [(0, ""), (1, "length")], [(0, "length")]]
    made = [
        group
        for step in steps
        for group in answer.pieces([(row, Event(1, 0, tokens=fox, finish=finish)) for row, finish in step])
    ]
    assert [list(group) for group in made] == groups
    texts = ["".join(group[row].text for group in made if row in group) for row in range(2)]
    assert texts == ["foxfoxfox", "foxfox"]
    assert answer.finished and answer.num_output_tokens == 5 * len(fox)


def test_the_core_loads_neither_triton_nor_numpy_nor_torch():
    program = (
        "import sys; from tridecode.backend.text import completion, encoding; "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('triton_python_backend_utils', 'c_python_backend_utils', 'numpy', 'torch', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
