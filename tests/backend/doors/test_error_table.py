"""Sends each row of the first table of docs/reference/errors.md, next to requests that must not be
affected."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES
from tests.backend.doors.test_fastertransformer import only, serving, tensors, word_list

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md"
PROMPTS = [[5, 6, 7], [8, 9]]
INT32 = np.int32
Arrays = dict[str, np.ndarray]


def request(**changes: object) -> Arrays:
    """Return a request of two rows for four new tokens. changes: one value, one per row, or a whole
    tensor."""
    return tensors(PROMPTS, 4, **changes)


def replaced(**changes: np.ndarray) -> Arrays:
    return {**request(), **changes}


def column(*values: float, dtype: type = np.uint32) -> np.ndarray:
    return np.array(values, dtype)[:, None]


def both(ids: list[int], offsets: list[int]) -> np.ndarray:
    return np.tile(word_list(ids, offsets), (2, 1, 1))


#: the first column of a row in the document -> the request
BAD: dict[str, Arrays] = {
    "`input_ids` of another rank": replaced(input_ids=np.ones((2, 2, 2), np.uint32)),
    "`input_lengths` of another batch": replaced(input_lengths=column(3, 2, 1)),
    "a value per row for another number of rows": replaced(random_seed=column(1, 2, 3, dtype=np.uint64)),
    "another dtype": replaced(temperature=column(1, 1, dtype=np.int32)),
    "a missing input": {k: v for k, v in request().items() if k != "input_lengths"},
    "a word list without ids and offsets": replaced(bad_words_list=np.zeros((2, 3, 2), INT32)),
    "a word list of another batch": replaced(bad_words_list=np.tile(word_list([5], [1]), (3, 1, 1))),
    "repetition and presence penalty": request(repetition_penalty=1.5, presence_penalty=0.5),
    "`input_lengths` beyond the width": replaced(input_lengths=column(3, 4)),
    "an id beyond the vocabulary": replaced(input_ids=np.array([[5, 6, 7], [8, 1000, 0]], np.uint32)),
    "`request_output_len` of 2^31 or more": request(request_output_len=np.array([[2**31], [4]], np.uint32)),
    "several numbers a row in `request_output_len`": replaced(
        request_output_len=np.full((2, 3), 4, np.uint32)
    ),
    "prompt and answer beyond the positions": replaced(request_output_len=column(510, 4)),
    "a negative temperature": request(temperature=[1.0, -1.0]),
    "a temperature of NaN": request(temperature=np.nan),
    "a repetition penalty of 0": request(repetition_penalty=0.0),
    "a negative repetition penalty": request(repetition_penalty=-2.0),
    "a top_p of NaN": request(runtime_top_p=np.nan),
    "a negative top_p": request(runtime_top_p=-0.5),
    "`top_p_decay` above 1": request(runtime_top_p=0.5, top_p_decay=1.5),
    "a reset id beyond the vocabulary": request(runtime_top_p=0.5, top_p_reset_ids=5000),
    "an offset beyond the ids": request(stop_words_list=both([5, 6], [9, -1])),
    "offsets that fall": request(stop_words_list=both([5, 6], [2, 1])),
    "a negative id in a word": request(bad_words_list=both([-5, 6], [2, -1])),
    "more ids in words than the engine holds": request(bad_words_list=both([4] * 65, list(range(1, 66)))),
    "flags that differ between rows": request(is_return_context_embeddings=[True, False]),
    "priorities that differ between rows": request(priority=np.array([[1], [2]], INT32)),
    "more logits than `max_logits_bytes`": replaced(
        request_output_len=column(500, 500), return_generation_logits=column(1, 1, dtype=np.bool_)
    ),
}


def rows_of(document: str) -> dict[str, tuple[str, str]]:
    """Map the first column to (code, text), for rows whose last column is a text in backquotes."""
    found = {}
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 4 and re.fullmatch("`.*`", cells[3]):
            found[cells[0]] = cells[2], cells[3].strip("`")
    return found


def send(door, *requests: Arrays) -> list[list[fake_triton.Sent]]:
    """Send all requests in one call of `execute`."""
    sent = [fake_triton.InferenceRequest(arrays) for arrays in requests]
    door.execute(sent)
    for one in sent:
        assert one.sender.wait(60)
    return [one.sender.sent for one in sent]


@pytest.fixture(scope="module")
def door():
    with serving() as door:
        yield door


@pytest.fixture(scope="module")
def control(door) -> tuple[Arrays, Arrays]:
    """A request, and its answer when it runs alone."""
    arrays = request(runtime_top_k=[1, 3], random_seed=[4, 5], is_return_log_probs=True)
    return arrays, only(send(door, arrays)[0])


def test_the_document_has_every_case_and_no_other():
    assert set(rows_of(DOCUMENT.read_text())) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_the_error_is_the_documents_and_a_request_beside_it_is_answered_bit_for_bit(door, control, name):
    arrays, wanted = control
    before, bad, after = send(door, arrays, BAD[name], arrays)
    assert len(bad) == 1 and bad[0].final and bad[0].error is not None
    found = ERROR_NAMES[bad[0].error.code()], bad[0].error.message()
    assert found == rows_of(DOCUMENT.read_text())[name]
    for answer in (only(before), only(after)):
        assert set(answer) == set(wanted)
        assert all(np.array_equal(answer[tensor], wanted[tensor]) for tensor in wanted)
