"""Conversations at the door, with a toy model behind it whose tokens are known."""

from __future__ import annotations

import contextlib
import re
import threading

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import LIMITS, FakeEngine, scripted, toy_tokens
from tests.waiting import wait_until
from tridecode.backend.doors.contracts.interactive import INTERACTIVE
from tridecode.backend.doors.interactive import TritonPythonModel
from tridecode.backend.wire.messages import SamplingParams

INPUTS = {field.name: f"TYPE_{field.dtype}" for field in INTERACTIVE.inputs}
OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in INTERACTIVE.outputs}
IDLE = {"sequence_batching": {"max_sequence_idle_microseconds": "60000000"}}
END = 2  # the toy engine's end id


@contextlib.contextmanager
def serving(decoupled: bool = False, **engine):
    config = fake_triton.model_config("fastertransformer", INPUTS, OUTPUTS, {}, decoupled, **IDLE)
    with running(TritonPythonModel, config, FakeEngine(**engine)) as door:
        yield door


@pytest.fixture(scope="module")
def door():
    with serving() as door:
        yield door


def a_round(
    key: int | str, rows: list[list[int]], count: int, start: bool = False, end: bool = False, **others
) -> fake_triton.InferenceRequest:
    """A request as the interactive clients shape it: [1, B, ...], scalars of one value a row as [1, B]."""
    width = max(map(len, rows))
    ids = np.zeros((1, len(rows), width), np.uint32)
    for row, tokens in enumerate(rows):
        ids[0, row, : len(tokens)] = tokens
    arrays = {
        "input_ids": ids,
        "input_lengths": np.array([[len(tokens) for tokens in rows]], np.uint32),
        "request_output_len": np.full((1, len(rows), 1), count, np.uint32),
        "START": np.array([[start]], np.int32),
        "END": np.array([[end]], np.int32),
        "READY": np.array([[1]], np.int32),
        "CORRID": np.array([[key if isinstance(key, int) else 0]], np.uint64),
    }
    for name, value in others.items():
        dtype = fake_triton.triton_string_to_numpy(INPUTS[name])
        arrays[name] = value if isinstance(value, np.ndarray) else np.full((1, len(rows)), value, dtype)
    return fake_triton.InferenceRequest(arrays, correlation_id=key)


def start(key: int | str, rows: list[list[int]], count: int, **others) -> fake_triton.InferenceRequest:
    return a_round(key, rows, count, start=True, **{"session_len": 100, **others})


def ids_of(sent) -> list[list[int]]:
    ids = only(sent)["output_ids"]
    assert ids.shape[0] == ids.shape[2] == 1
    return ids[0, :, 0].tolist()


def said(prompt: list[int], count: int) -> list[int]:
    return toy_tokens(prompt, count, SamplingParams(), LIMITS.vocab_size)


def test_each_answer_has_the_whole_history(door):
    first = fake_triton.ask(door, start(7, [[11, 12, 13], [21, 22, 23]], 4))
    histories = [[*row, *said(row, 4)] for row in ([11, 12, 13], [21, 22, 23])]
    assert ids_of(first) == histories
    assert only(first)["sequence_length"].tolist() == [[[7], [7]]]
    second = only(fake_triton.ask(door, a_round(7, [[31, 32], [41, 42]], 3, is_return_log_probs=True)))
    for row, new in enumerate(([31, 32], [41, 42])):
        whole = [*histories[row], *new]
        assert second["output_ids"][0, row, 0].tolist() == [*whole, *said(whole, 3)]
    assert second["output_ids"].shape == (1, 2, 1, 7 + 2 + 3)
    assert second["sequence_length"].tolist() == [[[12], [12]]]
    assert second["output_log_probs"].shape == (1, 2, 1, 3)
    assert (second["output_log_probs"] < 0).all()
    assert second["cum_log_probs"].shape == (1, 2, 1)
    submit = door.test_engine.submits[-1]
    assert [np.frombuffer(s.prompt, "<i4").tolist() for s in submit.sequences] == [[31, 32], [41, 42]]
    assert submit.session.retained == [7, 7]


def test_rows_of_other_lengths_have_no_gaps(door):
    fake_triton.ask(door, start(8, [[11, 12, 13], [21]], 2))
    histories = [[*row, *said(row, 2)] for row in ([11, 12, 13], [21])]
    rows = ids_of(fake_triton.ask(door, a_round(8, [[31], [41, 42]], 2, end_id=5)))
    for row, new in enumerate(([31], [41, 42])):
        whole = [*histories[row], *new]
        answer = [*whole, *said(whole, 2)]
        assert rows[row] == answer + [5] * (5 + 2 + 2 - len(answer))


def test_an_end_token_is_overwritten_by_the_next_prompt():
    with serving(next_token=scripted([50, END])) as door:
        assert ids_of(fake_triton.ask(door, start(1, [[11, 12]], 4))) == [[11, 12, 50, END, END, END]]
        assert ids_of(fake_triton.ask(door, a_round(1, [[13]], 1))) == [[11, 12, 50, 13, 50]]
        assert ids_of(fake_triton.ask(door, a_round(1, [[]], 1))) == [[11, 12, 50, 13, 50, 50]]
        assert door.test_engine.submits[-1].session.retained == [5]


def test_an_empty_first_row_starts_from_its_start_id(door):
    assert ids_of(fake_triton.ask(door, start(2, [[]], 2, start_id=9))) == [said([9], 2)]
    whole = [9, *said([9], 2), 14]
    assert ids_of(fake_triton.ask(door, a_round(2, [[14]], 2))) == [[*whole[1:], *said(whole, 2)]]


def test_end_frees_the_session(door):
    fake_triton.ask(door, start("a text", [[11]], 1))
    ended = len(door.test_engine.ended_sessions)
    fake_triton.ask(door, a_round("a text", [[12]], 1, end=True))
    wait_until(lambda: len(door.test_engine.ended_sessions) == ended + 1)
    code, text = refusal(fake_triton.ask(door, a_round("a text", [[13]], 1)))
    assert code == "NOT_FOUND"
    assert text == "session a text is gone: it has ended (sequence_end); start it again (sequence_start)"


def test_a_start_begins_again(door):
    fake_triton.ask(door, start(3, [[11, 12]], 1))
    assert ids_of(fake_triton.ask(door, start(3, [[13]], 2))) == [[13, *said([13], 2)]]
    wait_until(lambda: len(door.test_engine.sessions) <= len(door.conversations))


def test_a_cancelled_round_leaves_the_session_as_it_was():
    with serving(step_s=0.02) as door:
        first = ids_of(fake_triton.ask(door, start(1, [[11]], 2)))[0]
        request = a_round(1, [[12]], 90)
        door.execute([request])
        wait_until(lambda: door.test_engine.running)
        request.cancel()
        assert request.sender.wait(60)
        assert ids_of(fake_triton.ask(door, a_round(1, [[13]], 1))) == [[*first, 13, *said([*first, 13], 1)]]


def test_rounds_that_come_at_once_are_answered_in_order():
    with serving(step_s=0.01) as door:
        requests = [start(1, [[11]], 3), a_round(1, [[12] * 40], 3), a_round(1, [[13]], 3, end=True)]
        requests += [start(2, [[21]], 3), a_round(2, [[22]], 3)]
        door.execute(requests)
        assert all(request.sender.wait(60) for request in requests)
        for talk in (requests[:3], requests[3:]):
            history: list[int] = []
            for request in talk:
                new = request.inputs()[0].as_numpy()[0, 0].tolist()
                history = [*history, *new]
                history += said(history, 3)
                assert ids_of(request.sender.sent) == [history]


def test_a_round_that_waits_can_be_cancelled():
    with serving(step_s=0.2) as door:  # 4 s in which the second round waits
        rounds = [start(1, [[11]], 20), a_round(1, [[12]], 2), a_round(1, [[13]], 2)]
        door.execute(rounds)
        rounds[1].cancel()
        assert all(request.sender.wait(30) for request in rounds)
        assert refusal(rounds[1].sender.sent)[0] == "CANCELLED"
        history = [11, *said([11], 20), 13]
        assert ids_of(rounds[2].sender.sent) == [[*history, *said(history, 2)]]


def test_too_many_waiting_rounds_are_refused():
    with serving(step_s=0.02) as door:
        rounds = [start(1, [[11]], 10), *(a_round(1, [[12]], 1) for _ in range(17))]
        door.execute(rounds)
        assert refusal(rounds[-1].sender.sent if rounds[-1].sender.wait(60) else [])[0] == "UNAVAILABLE"
        assert all(request.sender.wait(60) and only(request.sender.sent) for request in rounds[:-1])


def test_places_without_a_request_are_answered_with_nothing(door):
    request = fake_triton.InferenceRequest({"READY": np.array([[0]], np.int32)})
    sent = fake_triton.ask(door, request)
    assert len(sent) == 1 and sent[0].final and sent[0].error is None and not sent[0].outputs


def test_a_stream_has_the_history_in_each_response():
    with serving(decoupled=True) as door:
        sent = fake_triton.ask(door, start(1, [[11, 12]], 3))
        answer = said([11, 12], 3)
        assert [one.outputs["sequence_length"].tolist() for one in sent] == [[[[3]]], [[[4]]], [[[5]]]]
        sent = fake_triton.ask(door, a_round(1, [[13]], 2))
        whole = [11, 12, *answer, 13]
        assert [one.outputs["output_ids"][0, 0, 0, :6].tolist() for one in sent] == [whole, whole]
        assert sent[-1].outputs["output_ids"][0, 0, 0].tolist() == [*whole, *said(whole, 2)]


def test_a_session_that_the_engine_lost_is_gone():
    with serving() as door:
        fake_triton.ask(door, start(42, [[11]], 1))
        door.test_engine.sessions.clear()
        for _ in range(2):
            code, text = refusal(fake_triton.ask(door, a_round(42, [[12]], 1)))
            assert code == "NOT_FOUND"
            assert re.match(r"session 42 is gone: the engine .*; start it again", text)
        assert ids_of(fake_triton.ask(door, start(42, [[11]], 1)))


def test_an_idle_session_is_forgotten(door, monkeypatch):
    fake_triton.ask(door, start(99, [[11]], 1))
    monkeypatch.setattr(door.conversations, "_idle_s", -5.0)
    monkeypatch.setattr(door.conversations, "_looked_at", 0.0)
    code, text = refusal(fake_triton.ask(door, a_round(99, [[12]], 1)))
    assert (code, "was idle for more than" in text) == ("NOT_FOUND", True)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (a_round(5, [[11]], 1, start=True), "INVALID_ARG", "input session_len is missing; the first round"),
        (a_round(6, [[11]], 1), "NOT_FOUND", "session 6 is gone: this model has no session of this sequence"),
        (start(0, [[11]], 1), "INVALID_ARG", "the request has no sequence_id; wanted one"),
        (start(5, [[11]], 1, session_len=513), "INVALID_ARG", r"session_len is 513; .* 1 to 512"),
        (start(5, [[11]], 1, session_len=0), "INVALID_ARG", "session_len is 0; this model accepts 1 to 512"),
        (start(5, [[11], [12]], 1, session_len=np.array([[9, 8]], np.uint32)), "INVALID_ARG", "one value"),
        (start(5, [[11] * 8], 3, session_len=10), "INVALID_ARG", r"width of 8 and .* 3 more, 11 in all"),
        (start(5, [[11] * 8], 1, memory_len=7), "INVALID_ARG", "memory_len is 7 and .* a width of 8"),
        (start(5, [[11]], 1, memory_len=0), "INVALID_ARG", "memory_len is 0; wanted 1 or more"),
        (start(5, [[11]], 1, beam_width=2), "UNSUPPORTED", "beam_width is 2"),
        (
            start(5, [[11]], 1, request_prompt_type=np.ones((1, 1), np.uint32)),
            "UNSUPPORTED",
            "request_prompt_type was sent",
        ),
        (
            start(5, [[11]], 1, input_ids=np.zeros((2, 1, 1), np.uint32)),
            "INVALID_ARG",
            r"input_ids has shape \[2, 1, 1\]; wanted a first axis of 1",
        ),
        (start(5, [[1000]], 1), "INVALID_ARG", "row 0 of input_ids has the token id 1000"),
    ],
)
def test_a_first_round_that_is_wrong_is_refused_by_name(door, request_, code, text):
    found, said_ = refusal(fake_triton.ask(door, request_))
    assert found == code and re.search(text, said_), said_
    if request_.correlation_id() == 5:
        assert refusal(fake_triton.ask(door, a_round(5, [[11]], 1)))[1].startswith(
            "session 5 is gone: its first"
        )


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"rows": [[11], [12]]}, "input_ids has 2 rows; the session has 1, and every round of it as many"),
        ({"session_len": 99}, "session_len is 99; the session began with 100"),
        ({"memory_len": 9}, "memory_len is 9; the session began with 100"),
        (
            {"count": 99},
            "the session has 3 tokens, input_ids has a width of 1 .* 99 more, 103 in all; wanted .* 100",
        ),
    ],
)
def test_a_later_round_that_is_wrong_changes_nothing(door, others, text):
    fake_triton.ask(door, start(10, [[11]], 2))
    others = {"rows": [[12]], "count": 1, **others}
    code, found = refusal(
        fake_triton.ask(door, a_round(10, others.pop("rows"), others.pop("count"), **others))
    )
    assert code == "INVALID_ARG" and re.search(text, found), found
    whole = [11, *said([11], 2), 12]
    assert ids_of(fake_triton.ask(door, a_round(10, [[12]], 1))) == [[*whole, *said(whole, 1)]]


def test_many_conversations_at_once(door):
    """Sixteen clients, each in a thread, take turns with their own session."""
    wrong = []

    def talk(key: int) -> None:
        history: list[int] = []
        for turn in range(4):
            new = [10 + key, 100 + turn]
            history += new
            history += said(history, 3)
            ask = start if turn == 0 else a_round
            if ids_of(fake_triton.ask(door, ask(1000 + key, [new], 3, end=turn == 3))) != [history]:
                wrong.append((key, turn))

    threads = [threading.Thread(daemon=True, target=talk, args=(key,)) for key in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
