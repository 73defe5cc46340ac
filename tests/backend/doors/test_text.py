"""The TensorRT-LLM ensemble's contract at the text door, with a scripted model."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import after_a_pause, only, refusal, running
from tests.backend.doors.tokenizers_at_hand import byte_level, metaspace_unigram
from tests.fake_engine import LIMITS, TOY_PERF, FakeEngine, scripted, toy_log_prob
from tests.waiting import wait_until
from tridecode.backend.doors.text import TritonPythonModel
from tridecode.backend.wire.structured_output import StructuredOutput

INPUTS = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_INT32"}
OUTPUTS = {
    "text_output": "TYPE_STRING",
    "cum_log_probs": "TYPE_FP32",
    "output_log_probs": "TYPE_FP32",
    "num_input_tokens": "TYPE_INT32",
    "num_output_tokens": "TYPE_INT32",
    "batch_index": "TYPE_INT32",
    "sequence_index": "TYPE_INT32",
    "finish_reason": "TYPE_STRING",
    "context_logits": "TYPE_FP32",
    "generation_logits": "TYPE_FP32",
    **dict.fromkeys(("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks"), "TYPE_INT32"),
    **dict.fromkeys(("kv_cache_alloc_total_blocks", "total_draft_tokens"), "TYPE_INT32"),
    "total_accepted_draft_tokens": "TYPE_INT32",
    "arrival_time_ns": "TYPE_INT64",
    "first_scheduled_time_ns": "TYPE_INT64",
    "first_token_time_ns": "TYPE_INT64",
    "last_token_time_ns": "TYPE_INT64",
    "acceptance_rate": "TYPE_FP32",
}
DTYPES = {
    "max_tokens": np.int32,
    "min_tokens": np.int32,
    "min_length": np.int32,
    "top_k": np.int32,
    "top_p": np.float32,
    "temperature": np.float32,
    "length_penalty": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "random_seed": np.uint64,
    "end_id": np.int32,
    "pad_id": np.int32,
    "beam_width": np.int32,
    "num_return_sequences": np.int32,
    "lora_task_id": np.uint64,
}
ANSWER = " world, hello streaming 東京 text! 😀 A stop word"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Tokenizers of two kinds in sibling folders of the model."""
    root = tmp_path_factory.mktemp("repository")
    for name, tokenizer, end in (
        ("bytes", byte_level(), "<|endoftext|>"),
        ("metaspace", metaspace_unigram(), "</s>"),
    ):
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return root


def ids_of(text: str, tokenizer=None) -> list[int]:
    return (tokenizer or byte_level()).encode(text, add_special_tokens=False).ids


EOS = byte_level().token_to_id("<|endoftext|>")


@contextlib.contextmanager
def serving(
    repository, says=None, decoupled=True, tokenizer="bytes", max_batch_size=64, config=None, **engine
):
    """says: the ids the model generates, whatever the prompt; by default ANSWER, then the end."""
    tokens = [*ids_of(ANSWER), EOS] if says is None else says
    limits = msgspec.structs.replace(
        LIMITS, vocab_size=600, end_id=EOS, start_id=EOS, max_logits_bytes=300_000
    )
    settings = fake_triton.model_config(
        "text", INPUTS, OUTPUTS, {"tokenizer_dir": tokenizer, **(config or {})}, decoupled, max_batch_size
    )
    fake = FakeEngine(limits=limits, next_token=scripted(tokens), **engine)
    with running(TritonPythonModel, settings, fake, repository) as door:
        yield door


@pytest.fixture(scope="module")
def door(repository):
    with serving(repository) as door:
        yield door


def tensors(text="Hello", max_tokens=100, **others) -> dict[str, np.ndarray]:
    texts = text if isinstance(text, list) else [text]
    batch = len(texts)
    arrays = {"text_input": strings([[t] for t in texts])}
    for name, value in {"max_tokens": max_tokens, **others}.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif isinstance(value, bool):
            arrays[name] = np.full((batch, 1), value)
        elif name in ("stop_words", "bad_words", "embedding_bias_words"):
            arrays[name] = strings([value] * batch)
        elif isinstance(value, str):
            arrays[name] = strings([[value]] * batch)
        else:
            arrays[name] = np.full((batch, 1), value, DTYPES[name])
    return arrays


def strings(rows: list[list]) -> np.ndarray:
    encoded = [[v.encode() if isinstance(v, str) else v for v in row] for row in rows]
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(encoded):
        array[i] = row
    return array


def ask(door, arrays, **request):
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def text_of(outputs) -> str:
    assert outputs["text_output"].shape == (1,)
    return outputs["text_output"][0].decode()


def last_params(door):
    return door.test_engine.submits[-1].sequences[0].params


def test_each_row_names_its_adapter(door):
    only_rows = ask(door, tensors(["a", "b"], 1, lora_name=strings([["french"], [""]])))
    assert sum(sent.error is None for sent in only_rows) >= 1
    names = [submit.sequences[0].lora_name for submit in door.test_engine.submits[-2:]]
    assert sorted(names) == ["", "french"]
    code, text = refusal(ask(door, tensors("a", 1, lora_name="x" * 129)))
    assert code == "INVALID_ARG" and "lora_name has 129 characters" in text


# ---------------------------------------------------------------- whole answers


def test_a_request_that_does_not_stream_gets_one_response_even_when_decoupled(door):
    out = only(ask(door, tensors("Hello")))
    assert text_of(out) == "Hello" + ANSWER
    assert out["num_input_tokens"].tolist() == [[len(ids_of("Hello"))]]
    assert out["num_output_tokens"].tolist() == [[len(ids_of(ANSWER)) + 1]]
    assert out["batch_index"].tolist() == out["sequence_index"].tolist() == [[0]]
    assert out["num_output_tokens"].dtype == np.int32
    assert "cum_log_probs" not in out


def test_exclude_input_in_output_leaves_the_prompt_out(door):
    assert text_of(only(ask(door, tensors("Hello", exclude_input_in_output=True)))) == ANSWER


def test_the_model_can_leave_the_prompt_out_by_default(repository):
    with serving(repository, config={"exclude_input_in_output": "true"}) as door:
        assert text_of(only(ask(door, tensors("Hello")))) == ANSWER
        assert text_of(only(ask(door, tensors("Hello", exclude_input_in_output=False)))) == "Hello" + ANSWER


def test_max_tokens_cuts_the_answer(door):
    out = only(ask(door, tensors("Hello", 2, exclude_input_in_output=True)))
    assert text_of(out) == byte_level().decode(ids_of(ANSWER)[:2])
    assert out["num_output_tokens"].tolist() == [[2]]


def test_a_request_without_max_tokens_gets_the_default_of_the_repository(repository):
    def sent(door, **others) -> tuple[int, int]:
        arrays = tensors("Hello", **others)
        del arrays["max_tokens"]
        only(ask(door, arrays))
        return last_params(door).max_tokens, last_params(door).min_tokens

    with serving(repository) as door:
        assert sent(door) == (256, 0)
        assert sent(door, min_tokens=np.array([[300]], np.int32)) == (300, 300)
    with serving(repository, config={"default_max_tokens": "7"}) as door:
        assert sent(door) == (7, 0)
    with serving(repository, config={"default_max_tokens": "5000"}) as door:
        assert sent(door) == (LIMITS.max_sequence_tokens - len(ids_of("Hello")), 0)
        both = {"text_input": strings([["Hello"], ["Hello world"]])}
        ask(door, both)
        assert last_params(door).max_tokens == LIMITS.max_sequence_tokens - len(ids_of("Hello world"))
        code, text = refusal(ask(door, tensors("Hello", 5000)))
        assert code == "INVALID_ARG" and "max_tokens asks for 5,000 more" in text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("messages", "it takes one prompt as text_input, to which no chat template is applied"),
        ("prompt", "it takes the prompt as text_input"),
    ],
)
def test_fields_of_openai_s_api_get_a_hint(door, name, wanted):
    code, text = refusal(ask(door, tensors("Hello"), parameters={name: "some text"}))
    assert code == "INVALID_ARG" and wanted in text and "some text" not in text
    code, text = refusal(ask(door, {**tensors("Hello"), name: strings([["some text"]])}))
    assert code == "UNSUPPORTED" and wanted in text and "some text" not in text


def test_max_tokens_0_gives_the_prompt(door):
    assert text_of(only(ask(door, tensors("Hello", 0)))) == "Hello"


def test_a_prompt_without_text_starts_from_the_start_id(door):
    assert text_of(only(ask(door, tensors("")))) == ANSWER
    assert np.frombuffer(door.test_engine.submits[-1].sequences[0].prompt, "<i4").tolist() == [EOS]


def test_several_texts_in_one_request_get_an_answer_each(door):
    texts = ["Hello", "the quick brown fox", "x"]
    sent = ask(door, tensors(texts, np.array([[100], [3], [2]], np.int32), exclude_input_in_output=True))
    assert [s.final for s in sent] == [False, False, True]
    rows = {s.outputs["batch_index"].item(): s.outputs for s in sent}
    first = byte_level().decode
    wanted = [ANSWER, first(ids_of(ANSWER)[:3]), first(ids_of(ANSWER)[:2])]
    assert [text_of(rows[row]) for row in range(3)] == wanted
    assert [rows[row]["num_input_tokens"].tolist() for row in range(3)] == [[[len(ids_of(t))]] for t in texts]
    assert all(rows[row]["batch_index"].shape == (1, 1) for row in rows)


SAYINGS = ["one", "two, and more", "three STOP never"]


def by_seed(history, generated, params, vocab_size) -> int:
    """The toy model says what the seed says."""
    ids = ids_of(SAYINGS[params.seed % 3])
    return ids[generated] if generated < len(ids) else EOS


@pytest.fixture(scope="module")
def choir(repository):
    with serving(repository) as door:
        door.test_engine.next_token = by_seed
        yield door


@pytest.mark.parametrize("kind", [{"num_return_sequences": 3}, {"beam_width": 3}], ids=["samples", "beams"])
@pytest.mark.parametrize("stream", [False, True])
def test_samples_and_beams_are_responses_with_a_sequence_index(choir, kind, stream):
    sent = ask(choir, tensors(["Hello", "x"], 30, exclude_input_in_output=True, stream=stream, **kind))
    assert [s.final for s in sent] == [False] * (len(sent) - 1) + [True]
    texts: dict[tuple[int, int], str] = {}
    ends = []
    for one in sent:
        key = one.outputs["batch_index"].item(), one.outputs["sequence_index"].item()
        texts[key] = texts.get(key, "") + text_of(one.outputs)
        ends += [key] * ("finish_reason" in one.outputs)
    assert texts == {(row, i): SAYINGS[i] for row in range(2) for i in range(3)}
    assert sorted(ends) == sorted(texts)


def test_a_stop_word_ends_one_sample_and_not_the_others(choir):
    asked = tensors("x", 30, num_return_sequences=3, exclude_input_in_output=True, stop_words=["STOP", "two"])
    texts = {s.outputs["sequence_index"].item(): text_of(s.outputs) for s in ask(choir, asked)}
    assert texts == {0: "one", 1: "", 2: "three "}


def test_the_request_is_cancelled_when_a_stop_word_has_ended_its_last_sample(repository):
    with serving(repository, step_s=0.002) as door:
        endless = ids_of("two STOP") + ids_of("a") * 400

        def next_token(history, generated, params, vocab_size):
            return endless[generated] if params.seed else by_seed(history, generated, params, vocab_size)

        door.test_engine.next_token = next_token
        asked = tensors("x", 400, num_return_sequences=3, exclude_input_in_output=True, stop_words=["STOP"])
        texts = {s.outputs["sequence_index"].item(): text_of(s.outputs) for s in ask(door, asked)}
        assert texts == {0: "one", 1: "two ", 2: "two "}
        wait_until(lambda: door.test_engine.cancels, 60)


def test_beams_have_the_stop_words_as_ids_and_do_not_show_them(choir):
    sent = ask(choir, tensors("x", 30, beam_width=3, exclude_input_in_output=True, stop_words=["STOP"]))
    assert [text_of(one.outputs) for one in sent] == ["one", "two, and more", "three "]
    params = last_params(choir)
    assert params.beam_pool and ids_of("STOP") in params.stop_words
    assert params.num_sequences == 3


def test_beams_can_be_fewer_than_they_were_searched_with(choir):
    early = np.array([[False]])
    sent = ask(choir, tensors("x", 5, beam_width=4, num_return_sequences=2, early_stopping=early))
    assert [one.outputs["sequence_index"].item() for one in sent] == [0, 1]
    params = last_params(choir)
    assert (params.beam_width, params.early_stopping, params.num_return_sequences) == (4, 0, 2)


def test_one_response_has_all_sequences_of_a_model_that_is_not_decoupled(repository):
    with serving(repository, decoupled=False) as door:
        door.test_engine.next_token = by_seed
        asked = tensors(["Hello", "x"], 30, num_return_sequences=2, exclude_input_in_output=True)
        out = only(ask(door, asked))
    assert [text.decode() for text in out["text_output"]] == [*SAYINGS[:2]] * 2
    assert out["batch_index"].tolist() == [[0], [0], [1], [1]]
    assert out["sequence_index"].tolist() == [[0], [1], [0], [1]]


def test_each_text_is_answered_as_soon_as_it_has_ended(repository):
    with serving(repository, step_s=0.005) as door:
        counts = np.array([[20], [1], [8]], np.int32)
        sent = ask(door, tensors(["Hello", "fox", "x"], counts))
        assert [s.outputs["batch_index"].item() for s in sent] == [1, 2, 0]
        assert sent[1].at - sent[0].at > 0.02 and sent[2].at - sent[1].at > 0.04


def test_a_model_that_is_not_decoupled_answers_several_texts_in_one_response(repository):
    with serving(repository, decoupled=False) as door:
        out = only(ask(door, tensors(["Hello", "fox"], exclude_input_in_output=True)))
        assert [text.decode() for text in out["text_output"]] == [ANSWER, ANSWER]
        assert out["batch_index"].tolist() == [[0], [1]]


def test_one_refused_row_ends_the_request_with_one_error(repository):
    """Each row is one request of the engine; here the queue has room for two."""
    with serving(repository, says=ids_of("abcd ") * 90, step_s=0.005) as door:
        door.test_engine.limits = msgspec.structs.replace(door.test_engine.limits, max_queued_requests=2)
        code, text = refusal(ask(door, tensors(["a", "b", "c", "d"], 400)))
        assert code == "UNAVAILABLE" and "the limit is 2" in text
        wait_until(lambda: door.test_engine.running == 0)


WITH_LOGITS = {"return_context_logits": True, "return_generation_logits": True}


def test_logits_are_those_of_the_prompt_and_of_each_new_token(door):
    prompt, answer = ids_of("Hello"), [*ids_of(ANSWER), EOS]
    out = only(ask(door, tensors("Hello", 60, **WITH_LOGITS)))
    assert out["context_logits"].shape == (1, len(prompt), 600)
    assert out["context_logits"][0, :, 3].tolist() == prompt
    assert out["generation_logits"].shape == (1, 1, len(answer), 600)
    assert out["generation_logits"][0, 0, :, 599].tolist() == [-token for token in answer]
    assert not {"context_logits", "generation_logits"} & set(only(ask(door, tensors("Hello"))))


def test_a_stream_has_the_prompts_logits_once_and_each_responses_own(door):
    answer = [*ids_of(ANSWER), EOS]
    sent = ask(door, tensors("Hello", 60, stream=True, **WITH_LOGITS))
    assert ["context_logits" in s.outputs for s in sent] == [True] + [False] * (len(sent) - 1)
    parts = [s.outputs["generation_logits"] for s in sent if "generation_logits" in s.outputs]
    assert np.concatenate(parts, 2)[0, 0, :, 0].tolist() == [-token for token in answer]
    for response in sent:
        rows = (
            response.outputs["generation_logits"].shape[2] if "generation_logits" in response.outputs else 0
        )
        assert rows == response.outputs["num_output_tokens"].item()


def test_logits_end_with_the_token_that_completes_a_stop_word(repository):
    with serving(repository, chunk=4) as door:
        out = only(ask(door, tensors("Hello", 60, stop_words=["streaming"], **WITH_LOGITS)))
        assert text_of(out) == "Hello world, hello "
        count = out["num_output_tokens"].item()
        answer = [*ids_of(ANSWER), EOS]
        assert out["generation_logits"][0, 0, :, 0].tolist() == [-token for token in answer[:count]]


def test_rows_of_several_lengths_have_zeros_beyond_their_logits(repository):
    with serving(repository, decoupled=False) as door:
        out = only(ask(door, tensors(["Hello", "Hello there"], 4, **WITH_LOGITS)))
        lengths = [len(ids_of("Hello")), len(ids_of("Hello there"))]
        assert out["context_logits"].shape == (2, max(lengths), 600)
        assert [int((row[:, 0] != 0).sum()) for row in out["context_logits"]] == lengths
        assert out["generation_logits"].shape == (2, 1, 4, 600)


def test_metrics_come_with_the_end_of_a_row(door):
    wanted = {
        "arrival_time_ns": TOY_PERF[0], "first_scheduled_time_ns": TOY_PERF[1],
        "first_token_time_ns": TOY_PERF[2], "last_token_time_ns": TOY_PERF[3],
        "kv_cache_alloc_new_blocks": TOY_PERF[4], "kv_cache_reused_blocks": TOY_PERF[5],
        "kv_cache_alloc_total_blocks": TOY_PERF[4] + TOY_PERF[5],
        "acceptance_rate": 0.0, "total_accepted_draft_tokens": 0, "total_draft_tokens": 0,
    }  # fmt: skip
    out = only(ask(door, tensors("Hello", return_perf_metrics=True)))
    assert {name: out[name].tolist() for name in wanted} == {name: [[v]] for name, v in wanted.items()}
    stopped = only(ask(door, tensors("Hello", stop_words=["hello"], return_perf_metrics=True)))
    assert stopped["arrival_time_ns"].tolist() == [[TOY_PERF[0]]]
    *before, last = ask(door, tensors("Hello", stream=True, return_perf_metrics=True))
    assert last.outputs["last_token_time_ns"].tolist() == [[TOY_PERF[3]]]
    assert not any("arrival_time_ns" in response.outputs for response in before)
    assert "arrival_time_ns" not in only(ask(door, tensors("Hello")))


def test_a_model_without_a_batch_axis_has_logits_without_one(repository):
    with serving(repository, max_batch_size=0) as door:
        arrays = {"text_input": np.array([b"Hello"], object), "max_tokens": np.array([3], np.int32)}
        flags = {name: np.array([True]) for name in (*WITH_LOGITS, "return_perf_metrics")}
        out = only(ask(door, {**arrays, **flags}))
        assert out["context_logits"].shape == (len(ids_of("Hello")), 600)
        assert out["generation_logits"].shape == (1, 3, 600)
        assert out["arrival_time_ns"].tolist() == [TOY_PERF[0]]


def test_log_probs_belong_to_the_tokens(door):
    out = only(ask(door, tensors("Hello", return_log_probs=True)))
    expected = [toy_log_prob(token) for token in [*ids_of(ANSWER), EOS]]
    assert out["output_log_probs"].tolist() == [[expected]]
    assert out["cum_log_probs"].tolist() == [[sum(expected)]]


def test_a_model_without_batch_dimension_takes_and_gives_flat_tensors(repository):
    with serving(repository, max_batch_size=0) as door:
        arrays = {"text_input": np.array([b"Hello"], object), "max_tokens": np.array([4], np.int32)}
        out = only(ask(door, {**arrays, "stop_words": np.array([b"zzz"], object)}))
        assert out["num_output_tokens"].tolist() == [4]
        assert out["text_output"].shape == (1,)


def test_the_space_of_a_sentencepiece_word_is_kept_after_the_prompt(repository):
    tokenizer = metaspace_unigram()
    says = [*ids_of("streaming text", tokenizer), tokenizer.token_to_id("</s>")]
    with serving(repository, says, tokenizer="metaspace") as door:
        end = tokenizer.token_to_id("</s>")
        assert text_of(only(ask(door, tensors("Hello", end_id=end)))) == "Hello streaming text"


# ---------------------------------------------------------------- streaming


def test_streamed_pieces_are_the_answer_without_the_prompt(door):
    sent = ask(door, tensors("Hello", stream=True, return_log_probs=True))
    assert "".join(text_of(s.outputs) for s in sent) == ANSWER
    assert [s.final for s in sent] == [False] * (len(sent) - 1) + [True]
    assert sum(s.outputs["num_output_tokens"].item() for s in sent) == len(ids_of(ANSWER)) + 1
    log_probs = [value for s in sent for value in s.outputs["output_log_probs"].reshape(-1).tolist()]
    assert log_probs == [toy_log_prob(token) for token in [*ids_of(ANSWER), EOS]]
    assert sent[-1].outputs["cum_log_probs"].item() == pytest.approx(sum(log_probs))
    assert not any("\ufffd" in text_of(s.outputs) for s in sent)


def test_a_client_that_falls_behind_gets_merged_pieces(door):
    sent = after_a_pause(door, fake_triton.InferenceRequest(tensors("Hello", stream=True)))
    assert len(sent) <= 3
    assert "".join(text_of(s.outputs) for s in sent) == ANSWER
    assert sum(s.outputs["num_output_tokens"].item() for s in sent) == len(ids_of(ANSWER)) + 1


def test_a_streamed_response_needs_one_new_tensor_at_most(repository, monkeypatch):
    made = []

    class _Counted(fake_triton.Tensor):
        def __init__(self, name, array):
            if name in OUTPUTS:
                made.append(name)
            super().__init__(name, array)

    with serving(repository, says=ids_of(" x" * 80), step_s=0.002) as slow:
        monkeypatch.setattr(fake_triton, "Tensor", _Counted)
        sent = ask(slow, tensors("Hello", 100, stream=True))
    assert len(sent) > 5 and all({"text_output", "num_output_tokens"} < set(one.outputs) for one in sent)
    assert sum(int(one.outputs["num_output_tokens"][0, 0]) for one in sent) == 100
    texts = {one.outputs["text_output"][0] for one in sent}
    assert made.count("text_output") <= len(texts) < len(sent)  # " x" and longer ones
    counts = {int(one.outputs["num_output_tokens"][0, 0]) for one in sent}
    others = [name for name in made if name != "text_output"]
    assert len(others) == len(counts) + 4  # num_input_tokens, both indices, finish_reason


def test_several_streamed_texts_are_told_apart_by_batch_index(door):
    sent = ask(door, tensors(["Hello", "fox"], stream=True))
    for row in (0, 1):
        mine = [s.outputs for s in sent if s.outputs["batch_index"].item() == row]
        assert "".join(map(text_of, mine)) == ANSWER
    assert [s.final for s in sent].count(True) == 1


def test_counts_can_be_left_out(door):
    flags = {"return_num_output_tokens": False, "return_num_input_tokens": False}
    for response in ask(door, tensors("Hello", stream=True, **flags)):
        assert not {"num_output_tokens", "num_input_tokens"} & set(response.outputs)


def test_only_requested_outputs_are_made(door):
    (response,) = ask(door, tensors("Hello"), requested_output_names=["text_output"])
    assert list(response.outputs) == ["text_output"]


def test_a_model_that_is_not_decoupled_refuses_to_stream(repository):
    with serving(repository, decoupled=False) as door:
        code, text = refusal(ask(door, tensors("Hello", stream=True)))
        assert code == "INVALID_ARG" and "decoupled" in text
        assert text_of(only(ask(door, tensors("Hello")))) == "Hello" + ANSWER


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("stop", ["streaming", "llo str", "東", "京 t", ", h"])
def test_a_stop_word_ends_the_text_before_it_and_the_generation(repository, stop, chunk, stream):
    says = ids_of(ANSWER) + ids_of("x") * 400  # the engine is still generating when the word is found
    with serving(repository, says=says, step_s=0.005, chunk=chunk) as door:
        arrays = tensors(
            "Hello", 400, stop_words=[stop, "never said"], stream=stream, exclude_input_in_output=True
        )
        sent = ask(door, arrays)
        assert "".join(text_of(s.outputs) for s in sent) == ANSWER[: ANSWER.index(stop)]
        assert sent[-1].final
        decoded = [byte_level().decode(ids_of(ANSWER)[:n]) for n in range(len(ids_of(ANSWER)) + 1)]
        complete = next(n for n, text in enumerate(decoded) if stop in text)
        assert sum(s.outputs["num_output_tokens"].item() for s in sent) == complete
        wait_until(lambda: door.test_engine.cancels)


def test_a_stop_word_of_one_text_leaves_the_others_alone(door):
    stops = strings([["streaming"], ["never said"]])
    sent = ask(door, tensors(["Hello", "fox"], stop_words=stops, exclude_input_in_output=True))
    texts = {s.outputs["batch_index"].item(): text_of(s.outputs) for s in sent}
    assert texts == {0: ANSWER[: ANSWER.index("streaming")], 1: ANSWER}


def test_empty_words_are_ignored(door):
    out = only(ask(door, tensors("Hello", stop_words=[""], bad_words=[""])))
    assert text_of(out) == "Hello" + ANSWER
    assert last_params(door).bad_words == []


def test_stop_ids_end_the_text_and_are_not_shown(repository):
    comma = ids_of("!")[0]
    with serving(repository, config={"stop_ids": f"{comma}, 599"}) as door:
        assert text_of(only(ask(door, tensors("")))) == ANSWER[: ANSWER.index("!")]
        assert last_params(door).end_ids == [EOS, comma, 599]


def test_an_end_id_that_is_no_special_token_is_not_shown(door):
    end = ids_of(ANSWER)[3]
    out = only(ask(door, tensors("", end_id=end)))
    assert text_of(out) == byte_level().decode(ids_of(ANSWER)[:3])
    assert out["num_output_tokens"].item() == 4


def test_bad_words_are_forbidden_with_and_without_a_space_before(door):
    only(ask(door, tensors("Hello", bad_words=["fox", "dog"])))
    assert last_params(door).bad_words == [ids_of("fox"), ids_of(" fox"), ids_of("dog"), ids_of(" dog")]


@pytest.mark.parametrize("over_http", [False, True])  # HTTP's generate endpoint sends the id as a parameter
def test_a_stop_request_ends_the_running_request_of_the_same_id(repository, over_http):
    def named(name: str) -> dict:
        return {"parameters": {"id": name}} if over_http else {"request_id": name}

    with serving(repository, says=ids_of("abcd ") * 90, step_s=0.005) as door:
        requests = [
            fake_triton.InferenceRequest(tensors("Hello", 400, stream=True), **named(name))
            for name in ("mine", "other")
        ]
        door.execute(requests)
        wait_until(lambda: all(r.sender.sent for r in requests))
        answer = only(ask(door, tensors("", 1, stop=True), **named("mine")))
        assert text_of(answer) == ""
        assert requests[0].sender.wait(60)
        sent = requests[0].sender.sent
        assert not any(s.error for s in sent)
        assert 0 < sum(s.outputs["num_output_tokens"].item() for s in sent) < 400
        assert sent[-1].outputs["finish_reason"].item() == b"abort"
        assert not requests[1].sender.wait(0.05)
        wait_until(lambda: door.test_engine.running == 1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_stopped_whole_answer_has_the_text_so_far(repository, decoupled, rows):
    says = ids_of("abcd ") * 90
    with serving(repository, says=says, step_s=0.005, decoupled=decoupled) as door:
        arrays = tensors(["Hello"] * rows, 400, exclude_input_in_output=True)
        request = fake_triton.InferenceRequest(arrays, request_id="mine")
        door.execute([request])
        wait_until(lambda: door.test_engine.running == rows and door.test_engine.steps > 30)
        only(ask(door, tensors("", 1, stop=True), request_id="mine"))
        assert request.sender.wait(60)
        sent = request.sender.sent
        assert [s.final for s in sent] == [False] * (len(sent) - 1) + [True]
        texts = [text.decode() for s in sent for text in s.outputs["text_output"]]
        counts = [count for s in sent for count in s.outputs["num_output_tokens"].reshape(-1).tolist()]
        assert len(texts) == len(counts) == rows
        for text, count in zip(texts, counts):
            assert 5 < count < 400
            assert text == byte_level().decode(says[:count])
        reasons = [reason for s in sent for reason in s.outputs["finish_reason"].reshape(-1).tolist()]
        assert reasons == [b"abort"] * rows
        wait_until(lambda: door.test_engine.running == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, b"stop"), ({"max_tokens": 3}, b"length"), ({"stop_words": ["text"]}, b"stop")],
)
def test_the_last_response_says_why_the_text_ended(door, stream, limits, reason):
    sent = ask(door, tensors("Hello", stream=stream, **limits))
    assert sent[-1].outputs["finish_reason"].tolist() == [[reason]]
    assert not any("finish_reason" in s.outputs for s in sent[:-1])


def test_a_stop_request_needs_an_id(door):
    code, text = refusal(ask(door, tensors("", 1, stop=True)))
    assert code == "INVALID_ARG" and "request id" in text


def test_a_client_that_leaves_ends_the_generation(repository):
    with serving(repository, says=ids_of("abcd ") * 90, step_s=0.005) as door:
        request = fake_triton.InferenceRequest(tensors("Hello", 400))
        door.execute([request])
        wait_until(lambda: door.test_engine.running == 1)
        request.cancel()
        assert request.sender.wait(60)
        wait_until(lambda: door.test_engine.running == 0)


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {"top_k": 1, "top_p": 1.0, "temperature": 1.0, "seed": 0}),
        ({"top_p": 1.0, "temperature": 0.5}, {"top_k": 0, "top_p": 1.0, "temperature": 0.5}),
        ({"top_p": 0.0, "top_k": 5}, {"top_k": 5, "top_p": 1.0}),
        ({"min_length": 3}, {"min_tokens": 3}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"min_tokens": 3, "min_length": 3}, {"min_tokens": 3}),
        ({"random_seed": 9}, {"seed": 9}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        (
            {"repetition_penalty": 1.5, "presence_penalty": 0.5},
            {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        ),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"beam_width": 1, "length_penalty": 2.0, "pad_id": 5, "num_return_sequences": 1}, {"top_k": 1}),
        ({"end_id": 7}, {"end_id": 7}),
        ({"end_id": -1}, {"end_id": -1}),
        ({"embedding_bias_words": [""]}, {}),
        ({"top_k": np.array([[3]], np.uint32)}, {"top_k": 3}),
    ],
)
def test_sampling_inputs_under_all_their_names(door, sent, expected):
    only(ask(door, tensors("Hello", 1, **sent)))
    params = last_params(door)
    assert {name: getattr(params, name) for name in expected} == expected


def test_the_models_end_id_is_the_default(door):
    only(ask(door, tensors("Hello", 1)))
    assert last_params(door).end_id == EOS


BAD = {
    "no text": ({"max_tokens": np.array([[1]], np.int32)}, "INVALID_ARG", "text_input is missing"),
    "negative max_tokens": (tensors("a", -1), "INVALID_ARG", "max_tokens is -1; wanted 0 to 2**31 - 1"),
    "too much": (
        tensors("a", 512),
        "INVALID_ARG",
        "text_input has 1 tokens and max_tokens asks for 512 more",
    ),
    "negative top_k": (tensors("a", top_k=-1), "INVALID_ARG", "top_k is -1"),
    "seeds that differ": (tensors("a", seed=1, random_seed=2), "INVALID_ARG", "seed and random_seed"),
    "no UTF-8": (
        tensors([b"ab\xff"]),
        "INVALID_ARG",
        "text_input of row 0 is not valid UTF-8: byte 2 is 0xff",
    ),
    "no UTF-8 in a word": (tensors("a", stop_words=[b"\x80"]), "INVALID_ARG", "stop_words of row 0"),
    "several texts a row": (
        {"text_input": strings([["a", "b"]]), "max_tokens": np.array([[1]], np.int32)},
        "INVALID_ARG",
        "text_input has shape",
    ),
    "many stop words": (
        tensors("a", stop_words=[f"w{i}" for i in range(100_000)]),
        "INVALID_ARG",
        "stop_words has 100,000 words",
    ),
    "many bad words": (
        tensors("a", bad_words=[f"word{i}" for i in range(64)]),
        "INVALID_ARG",
        "bad_words has",
    ),
    "too many beams": (tensors("a", beam_width=65), "INVALID_ARG", "beam_width is 65; wanted 1 to 64"),
    "no beam": (tensors("a", beam_width=0), "INVALID_ARG", "beam_width is 0; wanted 1 to 64"),
    "more answers than beams": (
        tensors("a", beam_width=2, num_return_sequences=3),
        "INVALID_ARG",
        "num_return_sequences is 3; wanted at most beam_width, 2",
    ),
    "too many samples": (tensors("a", num_return_sequences=65), "INVALID_ARG", "num_return_sequences is 65"),
    "LoRA": (tensors("a", lora_task_id=1), "UNSUPPORTED", "lora_task_id is 1"),
    "an unknown guide": (
        tensors("a", guided_decoding_guide_type="lark", guided_decoding_guide="{}"),
        "INVALID_ARG",
        'guided_decoding_guide_type is "lark"; wanted one of json, json_schema, regex, ebnf_grammar,',
    ),
    "a guide type alone": (
        tensors("a", guided_decoding_guide_type="regex"),
        "INVALID_ARG",
        "guided_decoding_guide is missing and guided_decoding_guide_type is regex; wanted both",
    ),
    "a schema for any JSON": (
        tensors("a", guided_decoding_guide_type="json", guided_decoding_guide='{"type": "array"}'),
        "INVALID_ARG",
        "and guided_decoding_guide_type is json; wanted none, or guided_decoding_guide_type json_schema",
    ),
    "a guide alone": (
        tensors("a", guided_decoding_guide="{}"),
        "INVALID_ARG",
        "guided_decoding_guide is sent without guided_decoding_guide_type; wanted both",
    ),
    "more logits than the engine gives": (
        tensors("Hello", 200, return_context_logits=True, return_generation_logits=True),
        "INVALID_ARG",
        "1 rows of 201 tokens have 482,400 bytes of logits; this model accepts 300,000 (max_logits_bytes",
    ),
    "decoder text": (tensors("a", decoder_text_input="x"), "UNSUPPORTED", "decoder_text_input has a text"),
    "bias without a weight": (
        tensors("a", embedding_bias_words=["x"]),
        "INVALID_ARG",
        "embedding_bias_words was sent without embedding_bias_weights",
    ),
    "bias without a word": (
        tensors("a", embedding_bias_weights=np.full((1, 1), 2, np.float32)),
        "INVALID_ARG",
        "embedding_bias_weights was sent without embedding_bias_words",
    ),
    "bias of another number": (
        tensors("a", embedding_bias_words=["x", "y"], embedding_bias_weights=np.full((1, 1), 2, np.float32)),
        "INVALID_ARG",
        "embedding_bias_words has 2 words and embedding_bias_weights has 1 numbers for row 0",
    ),
    "NaN as a bias": (
        tensors("a", embedding_bias_words=["x"], embedding_bias_weights=np.full((1, 1), np.nan, np.float32)),
        "INVALID_ARG",
        "embedding_bias_weights of row 0 has nan",
    ),
}


#: guided_decoding_guide_type and guided_decoding_guide -> the engine's constraint
GUIDES = {
    ("json", ""): StructuredOutput("json"),
    ("json", "{}"): StructuredOutput("json"),
    ("json_schema", '{"type": "object"}'): StructuredOutput("json_schema", '{"type": "object"}'),
    ("regex", "[0-9]+港"): StructuredOutput("regex", "[0-9]+港"),
    ("ebnf_grammar", 'root ::= "a"'): StructuredOutput("grammar", 'root ::= "a"'),
    ("structural_tag", '{"structures": [], "triggers": []}'): StructuredOutput(
        "structural_tag", '{"structures": [], "triggers": []}'
    ),
    ("", ""): None,
}


@pytest.mark.parametrize("guide", GUIDES)
def test_the_engine_gets_the_guide_of_an_answer(door, guide):
    only(ask(door, tensors("a", guided_decoding_guide_type=guide[0], guided_decoding_guide=guide[1])))
    assert door.test_engine.submits[-1].sequences[0].structured_output == GUIDES[guide]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_name_and_reaches_no_engine(door, case):
    arrays, code, text = BAD[case]
    before = len(door.test_engine.submits)
    found_code, found_text = refusal(ask(door, arrays))
    assert (found_code, text in found_text) == (code, True), found_text
    assert len(door.test_engine.submits) == before


@pytest.mark.parametrize(
    ("name", "meant"), [("topk", "top_k"), ("temprature", "temperature"), ("stop_word", "stop_words")]
)
def test_a_misspelt_field_is_refused_with_the_field_that_was_meant(door, name, meant):
    code, text = refusal(ask(door, tensors("a"), parameters={name: 1}))
    assert code == "INVALID_ARG" and f"did you mean the input {meant}?" in text


def test_parameters_that_the_operator_allows_pass(repository):
    with serving(repository, config={"allowed_parameters": "x-*, tenant"}) as door:
        only(ask(door, tensors("a"), parameters={"tenant": "t", "x-trace": "1"}))


def test_a_missing_tokenizer_fails_the_load_and_names_the_parameter(repository):
    with pytest.raises(fake_triton.TritonModelException, match="parameter tokenizer_dir"):
        with serving(repository, tokenizer="nothing-here"):
            pass


def test_a_tokenizer_of_another_model_is_noticed(repository):
    limits = msgspec.structs.replace(LIMITS, vocab_size=30)
    settings = fake_triton.model_config("text", INPUTS, OUTPUTS, {"tokenizer_dir": "bytes"}, True)
    with running(TritonPythonModel, settings, FakeEngine(limits=limits), repository) as door:
        code, text = refusal(ask(door, tensors("Hello")))
        assert code == "INVALID_ARG" and "so tokenizer and model do not belong together" in text


def test_words_bias_the_tokens_that_they_have(door):
    words = strings([[" fox", "stop", ""], ["a", " fox", "a"]])
    weights = np.array([[1.5, -2.0, 9.0], [0.5, 0.0, 0.25]], np.float32)
    asked = tensors(["Hello", "the"], embedding_bias_words=words, embedding_bias_weights=weights)
    fake_triton.ask(door, fake_triton.InferenceRequest(asked))
    found = [submit.sequences[0].params.logit_bias for submit in door.test_engine.submits[-2:]]
    assert found == [
        {**dict.fromkeys(ids_of(" fox"), 1.5), **dict.fromkeys(ids_of("stop"), -2.0)},
        dict.fromkeys(ids_of("a"), 0.75),
    ]
