"""TensorRT-LLM's token model at its door, with a scripted engine."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import LIMITS, TOY_PERF, FakeEngine, scripted, toy_log_prob
from tests.waiting import wait_until
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_TOKENS
from tridecode.backend.doors.token_model import TritonPythonModel
from tridecode.backend.wire.structured_output import StructuredOutput

INPUTS = {field.name: f"TYPE_{field.dtype}" for field in TENSORRT_LLM_TOKENS.inputs if field.declared}
OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in TENSORRT_LLM_TOKENS.outputs}
EOS = 2
ANSWER = [11, 12, 13, 14, 15]


@contextlib.contextmanager
def serving(decoupled=True, says=(*ANSWER, EOS), parameters=None, model=None, **engine):
    """says: the ids that the model generates after any prompt, the last one repeatedly. model: of the
    fake engine, instead."""
    limits = msgspec.structs.replace(LIMITS, vocab_size=600)
    settings = fake_triton.model_config("tensorrt_llm", INPUTS, OUTPUTS, parameters or {}, decoupled, 64)
    fake = FakeEngine(limits=limits, next_token=model or scripted(list(says)), **engine)
    with running(TritonPythonModel, settings, fake) as door:
        yield door


@pytest.fixture(scope="module")
def plain():
    with serving(decoupled=False) as door:
        yield door


@pytest.fixture(scope="module")
def streaming():
    with serving() as door:
        yield door


def tensors(rows=((5, 6, 7),), count=20, **others) -> dict[str, np.ndarray]:
    """A request as the doors get it: scalars [B], and [B, 1] from a config.pbtxt without reshape."""
    batch, width = len(rows), max(map(len, rows))
    ids = np.full((batch, width), EOS, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    arrays = {"input_ids": ids, "input_lengths": np.array([[len(row)] for row in rows], np.int32)}
    for name, value in {"request_output_len": count, **others}.items():
        dtype = fake_triton._TYPES[INPUTS[name]]
        arrays[name] = value if isinstance(value, np.ndarray) else np.full((batch,), value, dtype)
    return arrays


def ask(door, arrays, **request):
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def params(door):
    return [sequence.params for submit in door.test_engine.submits[-1:] for sequence in submit.sequences]


def ids(outputs) -> list:
    return outputs["output_ids"].tolist()


# ---------------------------------------------------------------- answers


def test_a_whole_answer_is_prompt_and_new_tokens_without_the_end_id(plain):
    out = only(ask(plain, tensors()))
    assert ids(out) == [[[5, 6, 7, *ANSWER]]] and out["output_ids"].dtype == np.int32
    assert out["sequence_length"].tolist() == [[8]]
    assert out["finish_reason"].tolist() == [[b"stop"]]
    assert (out["num_input_tokens"].tolist(), out["num_output_tokens"].tolist()) == ([[3]], [[6]])
    assert (out["batch_index"].tolist(), out["sequence_index"].tolist()) == ([[0]], [[0]])
    # benchmark_core_model.py reads the first output's shape, and expects no log-probs that it did not request
    assert next(iter(out)) == "output_ids" and "cum_log_probs" not in out


def test_the_prompt_is_left_out_if_the_request_or_the_configuration_says_so(plain):
    assert ids(only(ask(plain, tensors(exclude_input_in_output=True)))) == [[ANSWER]]
    with serving(decoupled=False, parameters={"exclude_input_in_output": "true"}) as door:
        assert ids(only(ask(door, tensors()))) == [[ANSWER]]
        assert ids(only(ask(door, tensors(exclude_input_in_output=False)))) == [[[5, 6, 7, *ANSWER]]]


def test_rows_of_a_plain_model_share_a_response_and_are_filled_with_the_pad_id(plain):
    rows = ((5, 6, 7), (8,))
    counts = np.array([2, 3], np.int32)
    out = only(ask(plain, tensors(rows, counts, pad_id=99)))
    assert ids(out) == [[[5, 6, 7, 11, 12]], [[8, 11, 12, 13, 99]]]
    assert out["sequence_length"].tolist() == [[5], [4]]
    assert out["batch_index"].tolist() == [[0], [1]]
    assert ids(only(ask(plain, tensors(rows, counts))))[1] == [[8, 11, 12, 13, EOS]]


def test_rows_of_a_decoupled_model_have_responses_of_their_own(streaming):
    sent = ask(streaming, tensors(((5,), (6,), (7,)), np.array([3, 1, 2], np.int32)))
    found = {int(s.outputs["batch_index"][0, 0]): ids(s.outputs) for s in sent}
    assert found == {0: [[[5, 11, 12, 13]]], 1: [[[6, 11]]], 2: [[[7, 11, 12]]]}
    assert [s.final for s in sent] == [False, False, True]


def test_a_stream_has_the_new_tokens_once_and_counts_them(streaming):
    sent = ask(streaming, tensors(streaming=True, return_log_probs=True))
    assert sum((ids(s.outputs)[0][0] for s in sent), []) == ANSWER
    assert all(s.outputs["sequence_length"].item() == len(ids(s.outputs)[0][0]) for s in sent)
    assert sum(s.outputs["num_output_tokens"].item() for s in sent) == len(ANSWER) + 1
    log_probs = np.concatenate([s.outputs["output_log_probs"][0, 0] for s in sent])
    assert log_probs.tolist() == [toy_log_prob(token) for token in (*ANSWER, EOS)]
    assert sent[-1].outputs["cum_log_probs"].item() == sum(log_probs.tolist())
    assert sent[-1].final and sent[-1].outputs["finish_reason"].tolist() == [[b"stop"]]


def test_log_probs_of_whole_rows_are_filled_with_zeros(plain):
    out = only(ask(plain, tensors(((5,), (6,)), np.array([1, 3], np.int32), return_log_probs=True)))
    expected = [[toy_log_prob(11), 0, 0], [toy_log_prob(token) for token in ANSWER[:3]]]
    assert out["output_log_probs"].tolist() == [[row] for row in expected]
    assert out["cum_log_probs"].tolist() == [[sum(row)] for row in expected]


def test_stop_words_stay_in_the_row_and_bad_words_reach_the_engine(plain):
    words = np.array([[[12, 13, 99], [2, 3, -1]]], np.int32)
    out = only(ask(plain, tensors(stop_words_list=words, bad_words_list=words)))
    assert ids(out) == [[[5, 6, 7, 11, 12, 13]]] and out["finish_reason"].tolist() == [[b"stop"]]
    assert params(plain)[0].bad_words == [[12, 13], [99]]


@pytest.mark.parametrize(
    ("end_id", "expected"),
    [(None, [11, 12]), (2, [11, 12]), (13, [11, 12]), (-1, ANSWER), (14, [11, 12, 13])],
)
def test_each_of_the_models_end_ids_ends_a_row_unseen_unless_the_request_has_another(end_id, expected):
    sent_as = {} if end_id is None else {"end_id": end_id}
    with serving(decoupled=False, parameters={"stop_ids": "13"}) as door:
        assert ids(only(ask(door, tensors(count=5, exclude_input_in_output=True, **sent_as)))) == [[expected]]


def test_every_field_of_sampling_reaches_the_engine(plain):
    ask(
        plain,
        tensors(
            temperature=0.5, runtime_top_k=0, runtime_top_p=0.9, runtime_top_p_min=0.25,
            runtime_top_p_decay=0.5, runtime_top_p_reset_ids=3, repetition_penalty=1.5,
            presence_penalty=0.25, frequency_penalty=0.75,
            min_tokens=2, seed=7,
        ),
    )  # fmt: skip
    (one,) = params(plain)
    found = (one.temperature, one.top_k, one.top_p_min, one.top_p_decay, one.top_p_reset_id, one.seed)
    assert found == (0.5, 0, 0.25, 0.5, 3, 7) and one.top_p == pytest.approx(0.9)
    assert (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) == (1.5, 0.25, 0.75)
    assert (one.min_tokens, one.max_tokens) == (2, 20)


def test_older_names_are_understood(plain):
    ask(plain, tensors(min_length=3, random_seed=9, output_log_probs=True))
    assert (params(plain)[0].min_tokens, params(plain)[0].seed) == (3, 9)
    assert params(plain)[0].return_log_probs


def test_what_preprocessing_sends_and_a_decoder_ignores_has_no_effect(plain):
    others = {
        "decoder_input_ids": np.array([[2]], np.int32), "decoder_input_lengths": 1,
        "embedding_bias": np.zeros((1, 0), np.float32), "len_penalty": 1.0, "early_stopping": True,
        "beam_width": 1, "num_return_sequences": 1, "beam_search_diversity_rate": 0.0, "lora_task_id": 0,
    }  # fmt: skip
    assert ids(only(ask(plain, tensors(**others)))) == [[[5, 6, 7, *ANSWER]]]


def test_a_row_without_a_prompt_starts_from_the_models_start_id(plain):
    empty = {**tensors(((5,),)), "input_lengths": np.array([[0]], np.int32)}
    assert ids(only(ask(plain, empty))) == [[ANSWER]]
    assert plain.test_engine.submits[-1].sequences[0].prompt == np.array([1], "<i4").tobytes()


def test_random_ids_of_a_benchmark_are_taken_modulo_the_vocabulary_if_the_configuration_says_so():
    wild = {**tensors(), "input_ids": np.array([[5, 2**31 - 1, 600]], np.int32)}
    with serving(decoupled=False, parameters={"wrap_token_ids": "true"}) as door:
        only(ask(door, wild))
        prompt = np.array([5, (2**31 - 1) % 600, 0], "<i4").tobytes()
        assert door.test_engine.submits[-1].sequences[0].prompt == prompt


def test_logits_of_rows_of_several_lengths_end_in_zeros(plain):
    counts = np.array([1, 3], np.int32)
    flags = {"return_context_logits": True, "return_generation_logits": True}
    out = only(ask(plain, tensors(((5, 6, 7), (8,)), counts, **flags)))
    assert out["context_logits"].shape == (2, 3, 600) and out["generation_logits"].shape == (2, 1, 3, 600)
    assert out["context_logits"][:, :, 9].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert out["generation_logits"][:, 0, :, 9].tolist() == [[-11, 0, 0], [-11, -12, -13]]


def test_a_stream_sends_the_prompts_logits_once_and_each_tokens_with_it(streaming):
    flags = {"return_context_logits": True, "return_generation_logits": True}
    sent = [s.outputs for s in ask(streaming, tensors(streaming=True, **flags))]
    assert [out["context_logits"][0, :, 0].tolist() for out in sent if "context_logits" in out] == [[5, 6, 7]]
    logits = np.concatenate([out["generation_logits"][0, 0, :, 0] for out in sent])
    assert logits.tolist() == [-token for token in (*ANSWER, EOS)]


def test_logits_beyond_the_engines_limit_are_refused():
    with serving(decoupled=False) as door:
        small = msgspec.structs.replace(door.link.limits(), max_logits_bytes=600 * 4 * 3)
        door.link.limits = lambda: small
        assert "bytes of logits" in refusal(ask(door, tensors(count=9, return_generation_logits=True)))[1]
        assert "context_logits" in only(ask(door, tensors(count=9, return_context_logits=True)))


def test_metrics_come_with_the_end_of_each_row(plain):
    out = only(ask(plain, tensors(((5,), (6,)), 2, return_perf_metrics=True)))
    times = ("arrival", "first_scheduled", "first_token", "last_token")
    assert [out[f"{name}_time_ns"].tolist() for name in times] == [[[t]] * 2 for t in TOY_PERF[:4]]
    blocks = [out[f"kv_cache_{name}_blocks"].tolist() for name in ("alloc_new", "reused", "alloc_total")]
    assert blocks == [[[count]] * 2 for count in (5, 1, 6)]
    assert out["acceptance_rate"].tolist() == out["total_draft_tokens"].tolist() == [[0]] * 2


# ---------------------------------------------------------------- samples and beams


def by_seed(history, generated, params, vocab_size) -> int:
    """Sample i of seed 1 generates 20 + 10 * i and the numbers after it."""
    return 10 * (params.seed + 1) + generated


def test_samples_of_a_plain_model_are_the_second_axis_and_missing_ones_have_no_length():
    with serving(decoupled=False, model=by_seed) as door:
        out = only(ask(door, tensors(count=2, seed=1, num_return_sequences=3)))
        assert ids(out) == [[[5, 6, 7, 20, 21], [5, 6, 7, 30, 31], [5, 6, 7, 40, 41]]]
        assert out["num_output_tokens"].tolist() == [[6]] and out["sequence_length"].tolist() == [[5, 5, 5]]
        wanted = {"seed": 1, "num_return_sequences": np.array([1, 2], np.int32), "return_log_probs": True}
        out = only(ask(door, tensors(((5,), (6,)), 2, **wanted)))
        assert ids(out) == [[[5, 20, 21], [EOS] * 3], [[6, 20, 21], [6, 30, 31]]]
        assert out["sequence_length"].tolist() == [[3, 0], [3, 3]]
        assert out["cum_log_probs"].shape == (2, 2) and out["output_log_probs"].shape == (2, 2, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_a_decoupled_model_are_responses_named_by_sequence_index(stream):
    with serving(model=by_seed) as door:
        sent = ask(door, tensors(((5,), (6,)), 3, seed=1, num_return_sequences=2, streaming=stream))
        found: dict[tuple[int, int], list[int]] = {}
        for one in sent:
            key = one.outputs["batch_index"].item(), one.outputs["sequence_index"].item()
            found[key] = found.get(key, []) + ids(one.outputs)[0][0]
        prompts = ([], []) if stream else ([5], [6])
        samples = ([20, 21, 22], [30, 31, 32])
        assert found == {(row, at): prompts[row] + samples[at] for row in (0, 1) for at in (0, 1)}
        assert [one.final for one in sent].count(True) == 1 and sent[-1].final


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_beams_of_a_row_are_one_response_also_in_a_stream(decoupled):
    with serving(decoupled, model=by_seed) as door:
        flags = {"streaming": decoupled, "exclude_input_in_output": True, "len_penalty": 1.0}
        sent = ask(door, tensors(count=3, seed=1, beam_width=2, early_stopping=False, **flags))
        out = only(sent)
        assert ids(out) == [[[20, 21, 22], [30, 31, 32]]] and out["sequence_length"].tolist() == [[3, 3]]
        (one,) = params(door)
        assert (one.beam_width, one.beam_pool, one.len_penalty, one.early_stopping) == (2, True, 1.0, 0)


def test_a_stop_request_ends_every_sample():
    with serving(says=[7], step_s=0.005) as door:
        request = fake_triton.InferenceRequest(tensors(count=400, num_return_sequences=3), request_id="mine")
        door.execute([request])
        wait_until(lambda: door.test_engine.steps > 5)
        ask(door, stop_request(), request_id="mine")
        assert request.sender.wait(60)
        ends = [one.outputs["finish_reason"].item() for one in request.sender.sent]
        assert ends == [b"abort"] * 3
        wait_until(lambda: door.test_engine.running == 0)


# ---------------------------------------------------------------- stop requests


def stop_request() -> dict[str, np.ndarray]:
    """Return the stop request of inflight_batcher_llm_client.py, whose shapes have no meaning."""
    return {
        "input_ids": np.empty((1, 1), np.int32), "input_lengths": np.zeros((1, 1), np.int32),
        "request_output_len": np.array([[0]], np.int32), "stop": np.array([[True]]),
    }  # fmt: skip


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_stop_request_ends_the_running_one_of_the_same_id_with_its_tokens_so_far(decoupled):
    with serving(decoupled, says=[7], step_s=0.005) as door:
        request = fake_triton.InferenceRequest(tensors(count=400, streaming=decoupled), request_id="mine")
        door.execute([request])
        wait_until(lambda: door.test_engine.steps > 5)
        answer = ask(door, stop_request(), request_id="mine", parameters={"Streaming": decoupled})
        assert [(s.outputs, s.error, s.final) for s in answer] == [({}, None, True)]
        assert request.sender.wait(60)
        last = request.sender.sent[-1]
        assert last.error is None and last.outputs["finish_reason"].tolist() == [[b"abort"]]
        tokens = sum(s.outputs["num_output_tokens"].item() for s in request.sender.sent)
        assert 1 <= tokens < 400
        wait_until(lambda: door.test_engine.running == 0)


def test_a_stop_request_needs_an_id(plain):
    assert "needs the request id" in refusal(ask(plain, stop_request()))[1]


# ---------------------------------------------------------------- refusals


def row(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


def test_each_row_has_a_guide_of_its_own(plain):
    kinds = np.array([[b"regex"], [b""]], object)
    texts = np.array([[b"[0-9]+"], [b""]], object)
    sent = tensors(rows=((5, 6), (7,)), guided_decoding_guide_type=kinds, guided_decoding_guide=texts)
    only(ask(plain, sent))
    outputs = [submit.sequences[0].structured_output for submit in plain.test_engine.submits[-2:]]
    assert outputs == [StructuredOutput("regex", "[0-9]+"), None]


def test_drafts_reach_the_engine_without_their_padding_and_may_be_declined(plain):
    drafts = np.array([[3, 4, 5], [6, -1, -1], [-1, -1, -1]], np.int32)
    sent = tensors(rows=((5, 6), (7,), (8,)), draft_input_ids=drafts)
    only(ask(plain, sent))
    found = [submit.sequences[0].params for submit in plain.test_engine.submits[-3:]]
    assert [one.draft_tokens for one in found] == [[3, 4, 5], [6], []]
    assert all(one.speculate for one in found)
    only(ask(plain, tensors(draft_input_ids=np.array([9, 8], np.int32), speculate=False)))
    assert params(plain)[0].draft_tokens == [9, 8] and not params(plain)[0].speculate


def test_a_number_for_each_id_is_a_bias(plain):
    """Ids whose number is 0 have none, and a narrower tensor leaves the last ids without one."""
    bias = np.zeros((1, 500), np.float32)
    bias[0, [3, 499]] = 2.5, -1e9
    only(ask(plain, {**tensors(rows=((5, 6),)), "embedding_bias": bias}))
    assert plain.test_engine.submits[-1].sequences[0].params.logit_bias == {3: 2.5, 499: -1e9}
    code, text = refusal(
        ask(plain, {**tensors(rows=((5, 6),)), "embedding_bias": np.full((1, 600), np.inf, np.float32)})
    )
    assert code == "INVALID_ARG" and "embedding_bias of row 0 is inf for token id 0" in text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"beam_width": 65}, "beam_width is 65; wanted"),
        ({"draft_logits": np.ones((1, 1, 4), np.float32)}, "draft_logits was sent"),
        ({"draft_input_ids": row(3, 600)}, "row 0 of draft_input_ids has the token id 600; wanted ids below"),
        ({"draft_input_ids": row(-1, 3, -2)}, "row 0 of draft_input_ids has the token id -1; wanted ids"),
        ({"draft_input_ids": row(*[3] * 999)}, "row 0 of draft_input_ids has 999 ids; this model accepts"),
        ({"draft_input_ids": np.zeros((2, 3), np.int32)}, "draft_input_ids has shape [2, 3]; wanted [1, n]"),
        (
            {"embedding_bias": np.ones((1, 601), np.float32)},
            "embedding_bias has shape [1, 601]; wanted [1, n]",
        ),
        (
            {"embedding_bias": np.full((1, 4), np.nan, np.float32)},
            "embedding_bias of row 0 is nan for token id 0",
        ),
        ({"embedding_bias": np.full((2, 4), 1, np.float32)}, "embedding_bias has shape [2, 4]"),
        ({"guided_decoding_guide": np.array([[b"{}"]], object)}, "without guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": np.array([[b"x"]], object)}, 'guide_type is "x"; wanted one of json'),
        ({"input_ids": row(5, 6, 600)}, "token id 600; wanted ids below 600"),
        ({"input_ids": row(5, 6, -1)}, "row 0 of input_ids has the token id -1"),
        ({"input_ids": None}, "input input_ids is missing"),
        ({"input_lengths": row(9)}, "input_lengths of row 0 is 9"),
        ({"request_output_len": row(600)}, "request_output_len asks for 600"),
        ({"request_output_len": row(-1)}, "request_output_len is -1"),
        ({"streaming": True}, "streaming is true; this model cannot stream"),
        ({"runtime_top_p": np.float32("nan")}, "runtime_top_p is nan"),
        ({"seed": np.zeros((3,), np.uint64)}, "seed has shape [3]"),
        ({"stop_words_list": np.array([[[3], [4]]], np.int32)}, "stop_words_list has the offset 4"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(plain, changes, complaint):
    arrays = tensors(**{name: value for name, value in changes.items() if value is not None})
    for name, value in changes.items():
        if value is None:
            del arrays[name]
    code, text = refusal(ask(plain, arrays))
    assert complaint in text
    assert code == ("UNSUPPORTED" if "does not implement" in text else "INVALID_ARG")


def test_unknown_request_parameters_are_refused_except_the_programs_own(plain):
    assert "topk" in refusal(ask(plain, tensors(), parameters={"topk": 3}))[1]
    assert ids(only(ask(plain, tensors(), parameters={"Streaming": False})))
