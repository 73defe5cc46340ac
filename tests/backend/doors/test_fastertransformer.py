"""The FasterTransformer contract at the door, with a toy model behind it whose tokens are known."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import time
import weakref
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import after_a_pause, door_at, only, refusal, running
from tests.fake_engine import (
    LIMITS,
    FakeEngine,
    FakeSupervisor,
    scripted,
    toy_beam_steps,
    toy_context_log_prob,
    toy_log_prob,
    toy_tokens,
)
from tests.waiting import wait_until
from tridecode.backend.doors.door import Outputs
from tridecode.backend.doors.fastertransformer import Answer, Prompts, TritonPythonModel
from tridecode.backend.wire import taken_requests
from tridecode.backend.wire.messages import Event, SamplingParams

INPUTS = {
    "input_ids": "TYPE_UINT32",
    "input_lengths": "TYPE_UINT32",
    "request_output_len": "TYPE_UINT32",
    "runtime_top_k": "TYPE_UINT32",
    "runtime_top_p": "TYPE_FP32",
    "random_seed": "TYPE_UINT64",
}
OUTPUTS = {
    "output_ids": "TYPE_UINT32",
    "sequence_length": "TYPE_UINT32",
    "response_input_lengths": "TYPE_INT32",
    "cum_log_probs": "TYPE_FP32",
    "output_log_probs": "TYPE_FP32",
    "context_embeddings": "TYPE_FP32",
    "context_logits": "TYPE_FP32",
    "generation_logits": "TYPE_FP32",
}
DTYPES = {
    "runtime_top_k": np.uint32,
    "runtime_top_p": np.float32,
    "beam_search_diversity_rate": np.float32,
    "temperature": np.float32,
    "len_penalty": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "random_seed": np.uint64,
    "is_return_log_probs": np.bool_,
    "is_return_context_embeddings": np.bool_,
    "is_return_context_cum_log_probs": np.bool_,
    "return_context_logits": np.bool_,
    "return_generation_logits": np.bool_,
    "frequency_penalty": np.float32,
    "beam_width": np.uint32,
    "start_id": np.uint32,
    "end_id": np.uint32,
    "min_length": np.int32,
    "prompt_learning_task_name_ids": np.uint32,
    "request_prompt_lengths": np.uint32,
    "request_prompt_type": np.uint32,
    "top_p_decay": np.float32,
    "top_p_min": np.float32,
    "top_p_reset_ids": np.uint32,
    "resume": np.bool_,
}


def config(decoupled: bool = False, **parameters: str) -> dict:
    return fake_triton.model_config("fastertransformer", INPUTS, OUTPUTS, parameters, decoupled)


@contextlib.contextmanager
def serving(decoupled: bool = False, **engine):
    engine.setdefault("limits", msgspec.structs.replace(LIMITS, max_logits_bytes=3_000_000))
    with running(TritonPythonModel, config(decoupled), FakeEngine(**engine)) as door:
        yield door


@pytest.fixture(scope="module")
def door():
    with serving() as door:
        yield door


@pytest.fixture(scope="module")
def streaming():
    with serving(decoupled=True) as door:
        yield door


def tensors(prompts: list[list[int]], output_len, pad: int = 0, **others) -> dict[str, np.ndarray]:
    """A request's inputs as FasterTransformer's clients shape them; other scalars one value or one per
    row."""
    batch, width = len(prompts), max(map(len, prompts))
    ids = np.full((batch, width), pad, np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    arrays = {
        "input_ids": ids,
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.uint32),
        "request_output_len": column(output_len, batch, np.uint32),
    }
    for name, value in others.items():
        arrays[name] = value if isinstance(value, np.ndarray) else column(value, batch, DTYPES[name])
    return arrays


def column(value, batch: int, dtype) -> np.ndarray:
    values = value if isinstance(value, list) else [value] * batch
    return np.array(values, dtype)[:, None]


def ask(door, arrays: dict[str, np.ndarray], **request) -> list[fake_triton.Sent]:
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def said(prompt: list[int], count: int, **params) -> list[int]:
    return toy_tokens(prompt, count, SamplingParams(**params), LIMITS.vocab_size)


def last_params(door) -> SamplingParams:
    return door.test_engine.submits[-1].sequences[0].params


# ---------------------------------------------------------------- answers


def beam_texts(params: SamplingParams, steps: int | None = None) -> list[list[tuple[int, float]]]:
    """Return (token, log probability) of each beam after `steps` steps of the toy engine, following the
    parents back."""
    taken = toy_beam_steps(params)[:steps]
    texts = []
    for beam in range(params.beam_width):
        text: list[tuple[int, float]] = []
        for step in reversed(taken):
            if step.tokens[beam] >= 0:
                text.append((step.tokens[beam], step.log_probs[beam]))
            beam = step.parents[beam]
        texts.append(text[::-1])
    return texts


def check_beams(out, row: int, prompt: list[int], texts: list[list[tuple[int, float]]], fill: int) -> None:
    for k, text in enumerate(texts):
        ids = prompt + [token for token, _ in text]
        width = out["output_ids"].shape[2]
        assert out["output_ids"][row, k].tolist() == ids + [fill] * (width - len(ids))
        assert out["sequence_length"][row, k] == len(ids)
        log_probs = [log_prob for _, log_prob in text]
        padding = out["output_log_probs"].shape[2] - len(log_probs)
        assert out["output_log_probs"][row, k].tolist() == log_probs + [0.0] * padding
        assert out["cum_log_probs"][row, k] == sum(log_probs)


def test_beams_come_best_first_and_rows_may_have_fewer_of_them(door):
    prompts = [[11, 12, 13, 14], [21, 22], [31]]
    widths = [2, 3, 1]
    others = {"end_id": [90, 91, 92], "beam_width": widths, "is_return_log_probs": True}
    out = only(ask(door, tensors(prompts, [3, 5, 4], pad=7, **others)))
    assert out["output_ids"].shape == (3, 3, 4 + 5) and out["output_log_probs"].shape == (3, 3, 5)
    assert out["cum_log_probs"].shape == out["sequence_length"].shape == (3, 3)
    assert out["response_input_lengths"].tolist() == [[4] * 3, [2] * 3, [1] * 3]
    check_beams(out, 0, prompts[0], beam_texts(SamplingParams(beam_width=2, max_tokens=3)), 90)
    check_beams(out, 1, prompts[1], beam_texts(SamplingParams(beam_width=3, max_tokens=5)), 91)
    alone = [(token, toy_log_prob(token)) for token in said(prompts[2], 4)]
    check_beams(out, 2, prompts[2], [alone], 92)
    assert (out["output_ids"][0, 2] == 90).all() and out["sequence_length"][0, 2] == 0
    assert (out["output_ids"][2, 1:] == 92).all() and not out["sequence_length"][2, 1:].any()


def test_beams_without_log_probs_have_zeros(door):
    out = only(ask(door, tensors([[5, 6]], 3, beam_width=2)))
    assert out["output_log_probs"].shape == (1, 2, 3)
    assert not out["cum_log_probs"].any() and not out["output_log_probs"].any()


def test_each_response_of_a_stream_has_the_best_beams_of_its_step(streaming):
    prompts = [[5, 6, 7], [8]]
    sent = tensors(prompts, [4, 3], end_id=[9, 9], beam_width=[3, 1], is_return_log_probs=True)
    answers = [response.outputs for response in ask(streaming, sent)]
    assert len(answers) == 4
    params = SamplingParams(beam_width=3, max_tokens=4)
    for step, out in enumerate(answers, 1):
        check_beams(out, 0, prompts[0], beam_texts(params, step), 9)
        assert out["sequence_length"][1, 0] == 1 + min(step, 3)


def test_rows_come_without_prompt_padding_and_filled_with_their_end_id(door):
    prompts = [[11, 12, 13, 14], [21, 22]]
    out = only(ask(door, tensors(prompts, [3, 5], pad=7, end_id=[90, 91])))
    first, second = said(prompts[0], 3), said(prompts[1], 5)
    assert out["output_ids"].dtype == np.uint32 and out["output_ids"].shape == (2, 1, 4 + 5)
    assert out["output_ids"][0, 0].tolist() == prompts[0] + first + [90, 90]
    assert out["output_ids"][1, 0].tolist() == prompts[1] + second + [91, 91]
    assert out["sequence_length"].tolist() == [[7], [7]] and out["sequence_length"].dtype == np.uint32
    assert out["response_input_lengths"].tolist() == [[4], [2]]
    assert out["response_input_lengths"].dtype == np.int32


def test_log_probs_are_zero_unless_asked_for_and_after_the_end(door):
    prompts = [[11, 12], [21, 22]]
    out = only(ask(door, tensors(prompts, [2, 4])))
    assert out["cum_log_probs"].tolist() == [[0.0], [0.0]]
    assert out["output_log_probs"].shape == (2, 1, 4) and not out["output_log_probs"].any()
    out = only(ask(door, tensors(prompts, [2, 4], is_return_log_probs=True)))
    first, second = ([toy_log_prob(token) for token in said(p, n)] for p, n in zip(prompts, (2, 4)))
    assert out["output_log_probs"][:, 0].tolist() == [[*first, 0.0, 0.0], second]
    assert out["cum_log_probs"].tolist() == [[sum(first)], [sum(second)]]
    assert out["cum_log_probs"].dtype == out["output_log_probs"].dtype == np.float32


def test_an_early_end_keeps_the_full_width():
    with serving(next_token=scripted([50, 51, 2, 99])) as door:
        out = only(ask(door, tensors([[5]], 6)))
        assert out["output_ids"][0, 0].tolist() == [5, 50, 51, 2, 2, 2, 2]
        assert out["sequence_length"].tolist() == [[4]]


def test_context_embeddings_come_when_asked_for(door):
    prompts = [[10, 20], [30, 40]]
    out = only(ask(door, tensors(prompts, 2, is_return_context_embeddings=True)))
    assert out["context_embeddings"].shape == (2, 1, LIMITS.hidden_size)
    assert out["context_embeddings"][:, 0, 0].tolist() == [30.0, 70.0]
    assert "context_embeddings" not in only(ask(door, tensors(prompts, 2)))


def test_logits_come_when_asked_for_and_are_zero_beyond_their_row(door):
    prompts, vocab = [[10, 20, 30], [40]], LIMITS.vocab_size
    out = only(ask(door, tensors(prompts, [2, 4], return_context_logits=True, return_generation_logits=True)))
    context, generation = out["context_logits"], out["generation_logits"]
    assert (context.shape, generation.shape) == ((2, 3, vocab), (2, 1, 4, vocab))
    assert context.dtype == generation.dtype == np.float32
    assert context[:, :, 0].tolist() == context[:, :, -1].tolist() == [[10, 20, 30], [40, 0, 0]]
    first, second = ([-float(token) for token in said(p, n)] for p, n in zip(prompts, (2, 4)))
    assert generation[:, 0, :, 7].tolist() == [[*first, 0, 0], second]
    out = only(ask(door, tensors(prompts, 2, return_context_logits=True)))
    assert "context_logits" in out and "generation_logits" not in out
    assert not {"context_logits", "generation_logits"} & set(only(ask(door, tensors(prompts, 2))))


def test_a_stream_has_its_logits_with_the_last_response(streaming):
    wanted = tensors([[10, 20], [30]], [2, 5], return_context_logits=True, return_generation_logits=True)
    sent = ask(streaming, wanted)
    assert [("context_logits" in s.outputs, "generation_logits" in s.outputs) for s in sent] == [
        *[(False, False)] * 4,
        (True, True),
    ]
    assert sent[-1].outputs["context_logits"][:, :, 0].tolist() == [[10, 20], [30, 0]]
    assert sent[-1].outputs["generation_logits"][1, 0, :, 0].tolist() == [-t for t in said([30], 5)]


def test_the_prompts_log_probability_is_added_to_the_sum_alone(door):
    prompts = [[11, 12], [21, 22]]
    flags = {"is_return_log_probs": True, "is_return_context_cum_log_probs": [True, False]}
    out = only(ask(door, tensors(prompts, 2, **flags)))
    sums = [sum(toy_log_prob(token) for token in said(prompt, 2)) for prompt in prompts]
    assert out["cum_log_probs"].tolist() == [[sums[0] + toy_context_log_prob(prompts[0])], [sums[1]]]
    assert out["output_log_probs"][0, 0].tolist() == [toy_log_prob(token) for token in said(prompts[0], 2)]
    out = only(ask(door, tensors(prompts, 2, is_return_context_cum_log_probs=True)))
    assert out["cum_log_probs"].tolist() == [[toy_context_log_prob(prompt)] for prompt in prompts]


def test_no_output_tokens_give_the_prompt_back(door):
    out = only(ask(door, tensors([[3, 4, 5]], 0)))
    assert out["output_ids"].tolist() == [[[3, 4, 5]]]
    assert out["sequence_length"].tolist() == [[3]]


def test_an_empty_row_starts_from_its_start_id_which_is_not_shown(door):
    out = only(ask(door, tensors([[], [8, 9]], 3, start_id=[77, 1])))
    assert out["output_ids"][0, 0].tolist() == [*said([77], 3), 2, 2]
    assert out["sequence_length"].tolist() == [[3], [5]]
    out = only(ask(door, tensors([[]], 3)))
    assert out["output_ids"].tolist() == [[said([LIMITS.start_id], 3)]]


def test_scalars_may_come_without_their_batch_dimension(door):
    arrays = {name: array.reshape(-1) for name, array in tensors([[5, 6]], 3, random_seed=4).items()}
    out = only(ask(door, arrays))
    assert out["output_ids"].tolist() == [[[5, 6, *said([5, 6], 3)]]]


def test_only_requested_outputs_are_made(door):
    out = only(ask(door, tensors([[5]], 2), requested_output_names=["output_ids"]))
    assert list(out) == ["output_ids"]


def test_the_sixteen_inputs_of_the_identity_test_are_served(door):
    batch = 8
    prompts = [[9915 % 900 + i for i in range(8)] for _ in range(batch)]
    arrays = tensors(
        prompts,
        24,
        runtime_top_k=1,
        runtime_top_p=0.0,
        beam_search_diversity_rate=0.0,
        temperature=1.0,
        len_penalty=1.0,
        repetition_penalty=1.0,
        random_seed=0,
        is_return_log_probs=True,
        beam_width=1,
        start_id=50256,
        end_id=50256,
        bad_words_list=np.tile(np.array([[[0], [-1]]], np.int32), (batch, 1, 1)),
        stop_words_list=np.tile(np.array([[[0], [-1]]], np.int32), (batch, 1, 1)),
    )
    out = only(ask(door, arrays))
    assert out["output_ids"].shape == (batch, 1, 32)
    assert out["output_ids"][3, 0, 8:].tolist() == said(prompts[3], 24)


# ---------------------------------------------------------------- streaming


def test_a_stream_gives_one_response_for_each_position(streaming):
    prompts = [[11, 12, 13], [21]]
    sent = ask(streaming, tensors(prompts, [4, 6], is_return_log_probs=True))
    whole = said(prompts[1], 6)
    assert len(sent) == 6
    assert [s.final for s in sent] == [False] * 5 + [True]
    for position, response in enumerate(sent, start=1):
        out = response.outputs
        assert out["output_ids"].shape == (2, 1, 3 + 6)
        assert out["output_ids"][1, 0].tolist() == [21, *whole[:position], *[2] * (8 - position)]
        assert out["sequence_length"].tolist() == [[3 + min(4, position)], [1 + position]]
        cum = sum(map(toy_log_prob, whole[:position]))
        assert out["cum_log_probs"][1, 0] == pytest.approx(cum)
    assert len(sent[-1].outputs["output_ids"][0, 0]) == 9


def test_a_stream_is_not_merged_after_a_pause(streaming):
    sent = after_a_pause(streaming, fake_triton.InferenceRequest(tensors([[5, 6]], 40)))
    assert [s.outputs["sequence_length"].item() for s in sent] == list(range(3, 43))


def test_many_streams_that_a_door_keeps_up_with_are_not_merged():
    with serving(decoupled=True, step_s=0.02) as door:
        requests = [fake_triton.InferenceRequest(tensors([[i, i + 1]], 12)) for i in range(100, 148)]
        door.execute(requests)
        for request in requests:
            assert request.sender.wait(60)
            assert [s.outputs["sequence_length"].item() for s in request.sender.sent] == list(range(3, 15))


def slow_requests(count: int, response_s: float, **others) -> list[fake_triton.InferenceRequest]:
    """Requests of two rows, 60 and 120 new tokens, whose responses take the server this time each."""
    requests = []
    for i in range(count):
        arrays = tensors([[10 + i, 11, 12], [20 + i]], [60, 120], is_return_log_probs=True, **others)
        requests.append(fake_triton.InferenceRequest(arrays))
        requests[-1].sender.before_send = lambda: time.sleep(response_s)
    return requests


def check_slow(i: int, sent: list[fake_triton.Sent]) -> None:
    """Each response of the i-th slow request against what the toy model says by itself, up to its length."""
    prompts = [[10 + i, 11, 12], [20 + i]]
    whole = [said(prompts[0], 60), said(prompts[1], 120)]
    positions = []
    for response in sent:
        assert response.error is None
        out = response.outputs
        position = int(out["sequence_length"][1, 0]) - 1
        positions.append(position)
        assert out["sequence_length"].tolist() == [[3 + min(60, position)], [1 + position]]
        for row in (0, 1):
            shown = whole[row][:position]
            ids = prompts[row] + shown
            assert out["output_ids"][row, 0].tolist() == ids + [2] * (3 + 120 - len(ids))
            log_probs = [toy_log_prob(token) for token in shown]
            assert out["output_log_probs"][row, 0].tolist() == log_probs + [0.0] * (120 - len(shown))
            assert out["cum_log_probs"][row, 0] == pytest.approx(sum(log_probs))
        assert out["context_embeddings"][:, 0, 0].tolist() == [33.0 + i, 20.0 + i]
    assert positions[0] == 1 and positions[-1] == 120
    assert positions == sorted(set(positions))
    assert [response.final for response in sent] == [False] * (len(sent) - 1) + [True]


def test_a_door_that_falls_behind_merges_and_loses_nothing():
    with serving(decoupled=True, step_s=0.001) as door:
        requests = slow_requests(8, 0.02, is_return_context_embeddings=True)
        began = time.monotonic()
        door.execute(requests)
        for i, request in enumerate(requests):
            assert request.sender.wait(60)
            check_slow(i, request.sender.sent)
            assert len(request.sender.sent) < 60
        assert time.monotonic() - began < 8 * 120 * 0.02 / 4  # the time of 4 senders one by one


def test_a_door_that_is_told_to_never_merges():
    config_ = config(True, merge_behind_s="inf")
    with running(TritonPythonModel, config_, FakeEngine()) as door:
        (request,) = slow_requests(1, 0.005)
        assert len(fake_triton.ask(door, request)) == 120


def answer(count: int, behind: Callable[[int], bool]) -> Answer:
    """Return the answer to one prompt of three ids."""
    prompts = Prompts(np.array([[5, 6, 7]]), [3], [1], [2])
    types = {name: fake_triton.triton_string_to_numpy(kind) for name, kind in OUTPUTS.items()}
    return Answer(prompts, [count], Outputs(types, []), False, 0, behind)


def lengths(responses: Iterable[list]) -> list[int]:
    """New tokens of each response."""
    return [int(tensors[1].as_numpy().item()) - 3 for tensors in responses]


def test_what_waits_is_one_response_behind_the_first_while_the_door_is_behind():
    asked: list[int] = []
    slow = True

    def behind(responses: int) -> bool:
        asked.append(responses)
        return slow

    stream = answer(20, behind)
    assert lengths(stream.take([(0, Event(1, 0, tokens=[9] * 6))])) == [1, 6]
    assert lengths(stream.take([(0, Event(1, 0, tokens=[9]))])) == [7]
    assert lengths(stream.take([(0, Event(1, 0, tokens=[9])) for _ in range(4)])) == [11]
    assert asked == [5, 4]  # not for the first response, nor for a single one
    slow = False
    assert lengths(stream.take([(0, Event(1, 0, tokens=[9] * 4))])) == [12, 13, 14, 15]
    slow = True
    assert not stream.finished
    assert lengths(stream.take([(0, Event(1, 0, tokens=[9] * 5, finish="length"))])) == [20]
    assert stream.finished and stream.num_output_tokens == 20


def test_a_stream_that_stops_early_ends_with_its_last_token():
    with serving(decoupled=True, next_token=scripted([50, 51, 2])) as door:
        sent = ask(door, tensors([[5]], 9))
        assert [s.outputs["sequence_length"].item() for s in sent] == [2, 3, 4]
        assert sent[-1].final


def test_several_tokens_of_one_event_still_give_a_response_each():
    with serving(decoupled=True, chunk=3) as door:
        assert len(ask(door, tensors([[5]], 7))) == 7


def test_a_stream_of_no_tokens_is_one_response(streaming):
    assert only(ask(streaming, tensors([[5, 6]], 0)))["sequence_length"].tolist() == [[2]]


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {"top_k": 1, "top_p": 1.0}),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, {"top_k": 1, "top_p": 1.0}),
        ({"runtime_top_k": 5}, {"top_k": 5, "top_p": 1.0}),
        ({"runtime_top_k": 5, "runtime_top_p": 0.0}, {"top_k": 5, "top_p": 1.0}),
        ({"runtime_top_k": 5, "runtime_top_p": 1.5}, {"top_k": 5, "top_p": 1.0}),
        ({"runtime_top_k": 5, "runtime_top_p": 0.5}, {"top_k": 5, "top_p": 0.5}),
        ({"runtime_top_k": 0, "runtime_top_p": 0.5}, {"top_k": 0, "top_p": 0.5}),
        ({"runtime_top_p": 1.0}, {"top_k": 0, "top_p": 1.0}),
        ({"runtime_top_k": 5000}, {"top_k": LIMITS.vocab_size}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"random_seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"repetition_penalty": 1.25, "presence_penalty": 0.0}, {"repetition_penalty": 1.25}),
        ({"repetition_penalty": 1.0, "presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": 0.25}, {"frequency_penalty": 0.25}),
        ({"min_length": 3}, {"min_tokens": 3}),
        (
            {"runtime_top_p": 0.5, "top_p_min": 0.0, "top_p_decay": 0.0},
            {"top_p_min": 1e-6, "top_p_decay": 1.0},
        ),
        (
            {"runtime_top_p": 0.5, "top_p_min": 0.25, "top_p_decay": 0.5},
            {"top_p_min": 0.25, "top_p_decay": 0.5},
        ),
        ({"runtime_top_k": 4, "runtime_top_p": 0.5, "top_p_decay": 0.5}, {"top_p_decay": 1.0}),
        ({"runtime_top_p": 0.5, "top_p_reset_ids": 2**32 - 1}, {"top_p_reset_id": -1}),
        ({"runtime_top_p": 0.5, "top_p_reset_ids": 9}, {"top_p_reset_id": 9}),
        ({"len_penalty": 0.0}, {}),
        ({"len_penalty": 1.0}, {}),
        ({"end_id": 50256}, {"end_id": -1}),
        ({"end_id": 7}, {"end_id": 7}),
    ],
)
def test_sampling_inputs_mean_what_fastertransformer_made_of_them(door, sent, expected):
    only(ask(door, tensors([[5, 6]], 1, **sent)))
    params = last_params(door)
    assert {name: getattr(params, name) for name in expected} == expected


def test_each_row_has_its_own_sampling(door):
    only(ask(door, tensors([[5], [6]], 2, runtime_top_k=[1, 2], random_seed=[7, 8])))
    first, second = (s.params for s in door.test_engine.submits[-1].sequences)
    assert (first.top_k, first.seed, second.top_k, second.seed) == (1, 7, 2, 8)


def word_list(ids: list[int], offsets: list[int]) -> np.ndarray:
    return np.array([[ids, offsets]], np.int32)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (word_list([10, 20, 21], [1, 3, -1]), [[10], [20, 21]]),
        (word_list([0], [-1]), []),
        (word_list([32], [0]), []),  # an item of no ids
        (word_list([0, 5], [1, 2]), [[0], [5]]),  # id 0 counts too
        (word_list([32094, 6], [1, 2]), [[6]]),  # beyond the vocabulary: can never be said
        (np.zeros((1, 2, 0), np.int32), []),
    ],
)
def test_word_lists_are_read_by_their_offsets(door, tensor, words):
    only(ask(door, tensors([[5]], 1, stop_words_list=tensor, bad_words_list=tensor)))
    assert last_params(door).stop_words == last_params(door).bad_words == words


# ---------------------------------------------------------------- bad requests


def without(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in arrays.items() if key != name}


BAD = {
    "no lengths": (without(tensors([[5]], 1), "input_lengths"), "INVALID_ARG", "input_lengths is missing"),
    "length beyond the width": (
        {**tensors([[5]], 1), "input_lengths": np.array([[2]], np.uint32)},
        "INVALID_ARG",
        "input_lengths of row 0 is 2; wanted 0 to 1, the width of input_ids",
    ),
    "id beyond the vocabulary": (
        tensors([[5, 1000]], 1),
        "INVALID_ARG",
        "token id 1000; wanted ids below 1,000",
    ),
    "too long": (
        tensors([[5] * 500], 13),
        "INVALID_ARG",
        "500 tokens and request_output_len asks for 13 more",
    ),
    "absurd output": (tensors([[5]], 2**32 - 1), "INVALID_ARG", "4,294,967,295 more; this model accepts 512"),
    "several output lengths a row": (
        {**tensors([[5], [6]], 1), "request_output_len": np.ones((2, 2), np.uint32)},
        "INVALID_ARG",
        r"request_output_len has shape \[2, 2\]; wanted \[2, 1\]",
    ),
    "negative temperature": (
        tensors([[5]], 1, temperature=-1.0),
        "INVALID_ARG",
        "temperature is -1.0; wanted",
    ),
    "nan temperature": (tensors([[5]], 1, temperature=np.nan), "INVALID_ARG", "temperature is nan"),
    "nan top_p": (tensors([[5]], 1, runtime_top_p=np.nan), "INVALID_ARG", "runtime_top_p is nan"),
    "negative top_p": (tensors([[5]], 1, runtime_top_p=-0.5), "INVALID_ARG", "runtime_top_p is -0.5"),
    "infinite top_p": (tensors([[5]], 1, runtime_top_p=np.inf), "INVALID_ARG", "runtime_top_p is inf"),
    "zero repetition penalty": (
        tensors([[5]], 1, repetition_penalty=0.0),
        "INVALID_ARG",
        "repetition_penalty",
    ),
    "two penalties": (
        tensors([[5]], 1, repetition_penalty=1.5, presence_penalty=0.5),
        "INVALID_ARG",
        "repetition_penalty is 1.5 and presence_penalty is 0.5",
    ),
    "decay above 1": (
        tensors([[5]], 1, runtime_top_p=0.5, top_p_decay=1.5),
        "INVALID_ARG",
        "top_p_decay is 1.5",
    ),
    "reset id beyond the vocabulary": (
        tensors([[5]], 1, runtime_top_p=0.5, top_p_reset_ids=5000),
        "INVALID_ARG",
        "top_p_reset_ids is 5000",
    ),
    "too many beams": (tensors([[5]], 1, beam_width=65), "INVALID_ARG", "beam_width is 65; wanted 1 to 64"),
    "no beam": (tensors([[5]], 1, beam_width=0), "INVALID_ARG", "beam_width is 0; wanted 1 to 64"),
    "beam diversity": (
        tensors([[5]], 1, beam_search_diversity_rate=math.nan),
        "INVALID_ARG",
        "beam_search_diversity_rate is nan; wanted a number from -1e6 to 1e6",
    ),
    "length penalty": (tensors([[5]], 1, len_penalty=17.0), "INVALID_ARG", "len_penalty is 17.0"),
    "more logits than the engine gives": (
        tensors([[5] * 100] * 2, 400, return_context_logits=True, return_generation_logits=True),
        "INVALID_ARG",
        r"return_context_logits and return_generation_logits: 2 rows of 500 tokens have 4,000,000 bytes of "
        r"logits; this model accepts 3,000,000 \(max_logits_bytes",
    ),
    "falling offsets": (
        tensors([[5]], 1, stop_words_list=word_list([1, 2, 3], [2, 1, 3])),
        "INVALID_ARG",
        "stop_words_list has the offset 1 after 2",
    ),
    "offset beyond the ids": (
        tensors([[5]], 1, bad_words_list=word_list([1, 2], [1, 3])),
        "INVALID_ARG",
        "bad_words_list has the offset 3 after 1; wanted ascending offsets of 0 to 2, its number of ids",
    ),
    "negative word id": (
        tensors([[5]], 1, bad_words_list=word_list([-4], [1])),
        "INVALID_ARG",
        "token id -4",
    ),
    "word list of another shape": (
        tensors([[5]], 1, bad_words_list=np.zeros((1, 3, 2), np.int32)),
        "INVALID_ARG",
        r"bad_words_list has shape \[1, 3, 2\]",
    ),
    "too many bad words": (
        tensors([[5]], 1, bad_words_list=word_list([4] * 65, list(range(1, 66)))),
        "INVALID_ARG",
        "bad_words_list has 65 token ids; this model accepts 64",
    ),
    "no rows": (
        {name: array[:0] for name, array in tensors([[5]], 1).items()},
        "INVALID_ARG",
        "input_ids has shape",
    ),
    "empty row with a start id beyond the vocabulary": (
        tensors([[]], 1, start_id=4000),
        "INVALID_ARG",
        "token id 4000",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_name_and_reaches_no_engine(door, case):
    arrays, code, text = BAD[case]
    before = len(door.test_engine.submits)
    found_code, found_text = refusal(ask(door, arrays))
    assert found_code == code
    assert re.search(text, found_text), found_text
    assert len(door.test_engine.submits) == before


def test_an_unknown_request_parameter_is_refused_and_the_likely_input_named(door):
    code, text = refusal(ask(door, tensors([[5]], 1), parameters={"runtime_topk": 4}))
    assert (
        code == "INVALID_ARG" and "runtime_topk" in text and "did you mean the input runtime_top_k?" in text
    )
    code, text = refusal(ask(door, tensors([[5]], 1), parameters={"temperature": 4}))
    assert "it is an input tensor" in text


def test_parameters_that_clients_add_themselves_pass(door):
    only(
        ask(
            door, tensors([[5]], 1), parameters={"triton_enable_empty_final_response": True, "sequence_id": 4}
        )
    )


# ---------------------------------------------------------------- life


def test_deadline_priority_and_label_reach_the_engine(door):
    only(ask(door, tensors([[5]], 1), request_id="abc", timeout_us=2_500_000, parameters={"priority": 3}))
    submit = door.test_engine.submits[-1]
    assert (submit.timeout_s, submit.priority, submit.label) == (2.5, 3, "abc")


def test_each_row_names_its_adapter(door):
    names = np.array([[b"french"], [b""], ["été".encode()]], object)
    only(ask(door, tensors([[5], [6], [7]], 1, lora_name=names)))
    assert [one.lora_name for one in door.test_engine.submits[-1].sequences] == ["french", "", "été"]
    only(ask(door, tensors([[5]], 1)))
    assert door.test_engine.submits[-1].sequences[0].lora_name == ""
    for name, text in ((b"\xff", "lora_name of row 0 is not valid UTF-8"), (b"x" * 129, "lora_name has 129")):
        code, found = refusal(ask(door, tensors([[5]], 1, lora_name=np.array([[name]], object))))
        assert (code, text in found) == ("INVALID_ARG", True)


def test_a_cancelled_client_ends_the_request_everywhere():
    with serving(decoupled=True, step_s=0.005) as door:
        request = fake_triton.InferenceRequest(tensors([[5]], 400))
        door.execute([request])
        wait_until(lambda: request.sender.sent)
        request.cancel()
        assert request.sender.wait(60)
        assert request.sender.sent[-1].error.code() == fake_triton.TritonError.CANCELLED
        wait_until(lambda: door.test_engine.running == 0)


def test_a_deadline_ends_the_request_with_an_error():
    with serving(step_s=0.005) as door:
        code, text = refusal(ask(door, tensors([[5]], 400), timeout_us=50_000))
        assert code == "CANCELLED" and "deadline" in text


def test_a_dead_engine_ends_every_open_request_once():
    with serving(decoupled=True, step_s=0.005) as door:
        requests = [fake_triton.InferenceRequest(tensors([[i]], 400, resume=False)) for i in range(20)]
        door.execute(requests)
        wait_until(lambda: all(request.sender.sent for request in requests))
        door.test_engine.stop()
        door.test_supervisor.set_phase("down", "rank 1 did not finish its step")
        for request in requests:
            assert request.sender.wait(60)
            last = request.sender.sent[-1]
            assert last.error.code() == fake_triton.TritonError.UNAVAILABLE
            assert "rank 1 did not finish its step" in last.error.message()


def test_unloading_ends_what_is_open():
    with FakeEngine(step_s=0.005) as engine, FakeSupervisor(engine) as supervisor:
        with door_at(TritonPythonModel, config(True), supervisor.endpoint) as door:
            request = fake_triton.InferenceRequest(tensors([[5]], 400))
            door.execute([request])
            wait_until(lambda: request.sender.sent)
        assert request.sender.wait(0)
        assert "unloaded" in request.sender.sent[-1].error.message()
        wait_until(lambda: engine.running == 0)


def test_loading_fails_with_the_engines_own_words():
    with FakeSupervisor() as supervisor:
        supervisor.set_phase("failed", "model.wte.weight.bin holds 8 bytes; wanted 16")
        with pytest.raises(fake_triton.TritonModelException, match="holds 8 bytes; wanted 16"):
            with door_at(TritonPythonModel, config(), supervisor.endpoint):
                pass


def test_a_wrong_parameter_fails_the_load_by_name():
    with pytest.raises(
        fake_triton.TritonModelException, match="parameter num_senders is 'many'; wanted a number"
    ):
        with door_at(TritonPythonModel, config(num_senders="many"), "ipc:///nowhere"):
            pass
    with pytest.raises(fake_triton.TritonModelException, match="parameter merge_behind_s is '0'; wanted"):
        with door_at(TritonPythonModel, config(True, merge_behind_s="0"), "ipc:///nowhere"):
            pass


def test_many_requests_at_once_get_their_own_tokens(door):
    requests = {i: fake_triton.InferenceRequest(tensors([[i, i + 1]], 8)) for i in range(100, 160)}
    door.execute(list(requests.values()))
    for i, request in requests.items():
        assert request.sender.wait(60)
        assert only(request.sender.sent)["output_ids"][0, 0, 2:].tolist() == said([i, i + 1], 8)


@pytest.mark.parametrize("case", ["served", "no beam", "no lengths", "negative temperature"])
def test_a_request_is_let_go_when_it_has_ended(door, case):
    """Triton's request holds shared memory, and a stub that exits with one in its garbage crashes."""
    arrays = tensors([[5]], 1) if case == "served" else BAD[case][0]
    request = fake_triton.InferenceRequest({name: array.copy() for name, array in arrays.items()})
    held = weakref.ref(request.inputs()[0])
    gc.collect()
    gc.disable()  # objects that only the collector would free count as held
    try:
        fake_triton.ask(door, request)
        request.sender._request = None  # a cycle of the stand-in itself
        del request
        wait_until(lambda: held() is None, 60)
    finally:
        gc.enable()


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_door_counts_the_requests_that_only_it_can_end(decoupled):
    with serving(decoupled, step_s=0.02) as door:

        def count() -> int:
            return taken_requests._LAYOUT.unpack_from(door.taken._memory, 0)[1]

        requests = [fake_triton.InferenceRequest(tensors([[5, 6]], length)) for length in (2, 90, 90)]
        bad = fake_triton.InferenceRequest({})
        door.execute([*requests, bad])
        assert requests[0].sender.wait(60) and bad.sender.wait(60)
        wait_until(lambda: count() == 2)
        requests[1].cancel()
        wait_until(lambda: count() == 1)
        assert requests[2].sender.wait(60)
        wait_until(lambda: count() == 0)
