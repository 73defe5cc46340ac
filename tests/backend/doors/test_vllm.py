"""vLLM's contract at its door, with a scripted model."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import after_a_pause, only, refusal, running
from tests.backend.doors.tokenizers_at_hand import byte_level, metaspace_unigram
from tests.fake_engine import LIMITS, FakeEngine, scripted, toy_log_prob
from tests.waiting import wait_until
from tridecode.backend.doors.contracts.vllm import KEYS, KEYS_BY_NAME, VLLM
from tridecode.backend.doors.vllm import TritonPythonModel
from tridecode.backend.wire.messages import MAX_LORA_NAME
from tridecode.backend.wire.structured_output import StructuredOutput

OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in VLLM.outputs}
REASONS = {"return_finish_reason": True, "return_num_output_tokens": True}
ANSWER = " world, hello streaming 東京 text! 😀 A stop word"
EOS = byte_level().token_to_id("<|endoftext|>")


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    for name, tokenizer, end in (
        ("bytes", byte_level(), "<|endoftext|>"),
        ("metaspace", metaspace_unigram(), "</s>"),
    ):
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return root


@contextlib.contextmanager
def serving(
    repository, says=None, decoupled=True, config=None, tokenizer="bytes", grammar_fault="", **engine
):
    """says: the ids that the model generates, whatever the prompt; by default ANSWER, then the end."""
    tokens = [*ids_of(ANSWER), EOS] if says is None else says
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=EOS, start_id=EOS)
    limits = msgspec.structs.replace(limits, grammar_fault=grammar_fault)
    parameters = {"tokenizer_dir": tokenizer, **(config or {})}
    settings = fake_triton.model_config("vllm", {}, OUTPUTS, parameters, decoupled, 0)
    fake = FakeEngine(limits=limits, next_token=scripted(tokens), **engine)
    with running(TritonPythonModel, settings, fake, repository) as door:
        yield door


@pytest.fixture(scope="module")
def door(repository):
    with serving(repository) as door:
        yield door


def tensors(text="Hello", sampling: dict | str | None = None, **flags) -> dict[str, np.ndarray]:
    """sampling: an object, or the text of the tensor; by default with room for ANSWER."""
    sampling = {"max_tokens": 100} if sampling is None else sampling
    sent = sampling if isinstance(sampling, (str, bytes)) else json.dumps(sampling)
    arrays = {"text_input": array_of(text), "sampling_parameters": array_of(sent)}
    return {**arrays, **{name: np.array([flag]) for name, flag in flags.items()}}


def array_of(text: str | bytes) -> np.ndarray:
    return np.array([text.encode() if isinstance(text, str) else text], object)


def ask(door, arrays, **request):
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def text_of(outputs) -> str:
    assert outputs["text_output"].shape == (1,)
    return outputs["text_output"][0].decode()


def last_params(door):
    return door.test_engine.submits[-1].sequences[0].params


def params_for(door, **sampling):
    only(ask(door, tensors(sampling={"max_tokens": 1, **sampling})))
    return last_params(door)


# ---------------------------------------------------------------- answers


def test_a_whole_answer_begins_with_the_prompt_and_has_nothing_that_was_not_asked_for(door):
    outputs = only(ask(door, tensors("Hello", {"max_tokens": 100})))
    assert text_of(outputs) == "Hello" + ANSWER and list(outputs) == ["text_output"]
    outputs = only(ask(door, tensors("Hello", {"max_tokens": 100}, exclude_input_in_output=True)))
    assert text_of(outputs) == ANSWER


def test_a_stream_has_deltas_without_the_prompt(repository):
    with serving(repository, step_s=0.003) as door:
        wanted = {name: True for name in ("return_finish_reason", "return_num_output_tokens")}
        sent = ask(door, tensors("Hello", {"max_tokens": 100}, stream=True, **wanted))
        assert "".join(text_of(one.outputs) for one in sent) == ANSWER
        reasons = [one.outputs["finish_reason"][0] for one in sent]
        assert reasons == [b"None"] * (len(sent) - 1) + [b"stop"] and len(sent) > 5
        counts = [one.outputs["num_output_tokens"].tolist() for one in sent]
        assert sum(count for (count,) in counts) == len(ids_of(ANSWER)) + 1
        assert [one.final for one in sent] == [False] * (len(sent) - 1) + [True]


def test_a_stream_cannot_have_the_prompt(door):
    code, text = refusal(ask(door, tensors(stream=True, exclude_input_in_output=False)))
    assert code == "INVALID_ARG" and text == (
        "stream is true and exclude_input_in_output is false; a stream has no prompt"
    )
    assert only(ask(door, tensors(sampling={"max_tokens": 1}, exclude_input_in_output=False)))


def test_a_slow_client_gets_merged_deltas(door):
    request = fake_triton.InferenceRequest(
        tensors(sampling={"max_tokens": 100, "logprobs": 1}, stream=True, return_logprobs=True)
    )
    sent = after_a_pause(door, request)
    assert len(sent) < 4 and "".join(text_of(one.outputs) for one in sent) == ANSWER
    assert sum(len(json.loads(one.outputs["logprobs"][0])) for one in sent) == len(ids_of(ANSWER)) + 1


def test_the_optional_outputs_have_the_contracts_types_and_shapes(door):
    flags = {name: True for name in VLLM.by_name if name.startswith("return_")}
    outputs = only(ask(door, tensors("Hello", {"max_tokens": 3, "logprobs": 2}, **flags)))
    first = ids_of(ANSWER)[:3]
    assert {name: array.dtype for name, array in outputs.items()} == {
        "text_output": object, "finish_reason": object, "logprobs": object,
        "cumulative_logprob": np.float32, "num_input_tokens": np.uint32, "num_output_tokens": np.uint32,
    }  # fmt: skip
    assert all(array.shape == (1,) for array in outputs.values())
    assert outputs["finish_reason"][0] == b"length"
    assert outputs["num_input_tokens"].tolist() == [len(ids_of("Hello"))]
    assert outputs["num_output_tokens"].tolist() == [3]
    assert outputs["cumulative_logprob"].tolist() == [sum(toy_log_prob(token) for token in first)]


def test_log_probs_are_one_json_object_a_token_with_the_chosen_one_first(door):
    asked = tensors("Hello", {"max_tokens": 2, "logprobs": 2}, return_logprobs=True)
    found = json.loads(only(ask(door, asked))["logprobs"][0])
    for token, alternatives in zip(ids_of(ANSWER)[:2], found, strict=True):
        assert list(alternatives) == [str(token), str(token + 1)]
        assert alternatives[str(token)] == {
            "logprob": toy_log_prob(token), "rank": 1, "decoded_token": byte_level().decode([token]),
        }  # fmt: skip
        assert alternatives[str(token + 1)]["rank"] == 2
        assert alternatives[str(token + 1)]["logprob"] == toy_log_prob(token) - 1


@pytest.mark.parametrize(
    ("sampling", "flags", "wanted", "count"),
    [
        ({}, {"return_logprobs": True}, b"null", -1),
        ({}, {"return_logprobs": True, "return_cumulative_logprob": True}, b"null", 0),
        ({"logprobs": 0}, {"return_logprobs": True}, None, 0),
        ({"logprobs": 5}, {}, None, -1),
        ({"logprobs": 5}, {"return_cumulative_logprob": True}, None, 0),
    ],
)
def test_the_engine_is_asked_for_no_more_log_probs_than_are_returned(door, sampling, flags, wanted, count):
    outputs = only(ask(door, tensors("Hello", {"max_tokens": 2, **sampling}, **flags)))
    assert last_params(door).top_log_probs == count
    if wanted is not None:
        assert outputs["logprobs"][0] == wanted
    elif "return_logprobs" in flags:
        assert [len(one) for one in json.loads(outputs["logprobs"][0])] == [1, 1]


def test_the_texts_of_tokens_join_to_the_answer_also_where_a_decoder_strips_spaces(repository):
    tokenizer = metaspace_unigram()
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False).ids
    with serving(repository, [*ids, *ids], tokenizer="metaspace") as door:
        asked = tensors("the", {"max_tokens": 2 * len(ids), "logprobs": 0}, return_logprobs=True)
        outputs = only(ask(door, {**asked, "exclude_input_in_output": np.array([True])}))
        found = json.loads(outputs["logprobs"][0])
    joined = "".join(token["decoded_token"] for one in found for token in one.values())
    assert joined == text_of(outputs) and joined.count(" ") > 5


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_a_prompt_are_in_one_response(repository, stream):
    def says(history, generated, params, vocab_size):
        return [*ids_of(ANSWER), EOS][generated] if params.seed == 7 else [*ids_of(" fox"), EOS][generated]

    flags = {name: True for name in VLLM.by_name if name.startswith("return_")}
    sampling = {"n": 3, "best_of": 3, "seed": 7, "max_tokens": 100, "logprobs": 0}
    with serving(repository, step_s=0.003) as door:
        door.test_engine.next_token = says
        sent = ask(door, tensors("Hello", sampling, stream=stream, **flags))
    assert stream == (len(sent) > 1)
    pieces = [one.outputs["text_output"].tolist() for one in sent]
    texts = [b"".join(parts).decode() for parts in zip(*pieces)]
    echo = "" if stream else "Hello"
    assert texts == [echo + ANSWER, echo + " fox", echo + " fox"]
    counts = np.sum([one.outputs["num_output_tokens"] for one in sent], axis=0).tolist()
    assert counts == [len(ids_of(ANSWER)) + 1, len(ids_of(" fox")) + 1, len(ids_of(" fox")) + 1]
    last = sent[-1].outputs
    assert last["finish_reason"].tolist() == [b"stop"] * 3 and last["num_input_tokens"].shape == (1,)
    fox = sum(toy_log_prob(token) for token in [*ids_of(" fox"), EOS])
    assert np.allclose(last["cumulative_logprob"][1:], fox)


@pytest.mark.parametrize("n", [1, 2])
def test_the_most_likely_of_best_of_samples_are_returned(repository, n):
    answers = {7: " world", 8: " fox", 9: " stop word", 10: " hello"}

    def says(history, generated, params, vocab_size):
        return [*ids_of(answers[params.seed]), EOS][generated]

    def log_prob(text):
        return sum(toy_log_prob(token) for token in [*ids_of(text), EOS])

    with serving(repository) as door:
        door.test_engine.next_token = says
        sampling = {"n": n, "best_of": 4, "seed": 7, "max_tokens": 50}
        flags = {"return_cumulative_logprob": True, "exclude_input_in_output": True}
        outputs = only(ask(door, tensors("Hello", sampling, **flags)))
        _, text = refusal(ask(door, tensors("Hello", sampling, stream=True)))
    best = sorted(answers.values(), key=log_prob, reverse=True)[:n]
    assert [one.decode() for one in outputs["text_output"]] == best
    assert outputs["cumulative_logprob"].tolist() == [log_prob(one) for one in best]
    assert f"best_of is 4, n is {n} and stream is true" in text


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_has_every_token_of_the_prompt_once(repository, stream):
    """The toy engine's logits at a token are all equal."""
    prompt = "Hello streaming text"
    ids = ids_of(prompt)
    with serving(repository, step_s=0.003) as door:
        sampling = {"max_tokens": 50, "prompt_logprobs": 2, "n": 2, "truncate_prompt_tokens": len(ids) - 1}
        sent = ask(door, tensors(prompt, sampling, stream=stream))
        assert last_params(door).return_context_logits
        without = ask(door, tensors(prompt, {"max_tokens": 2}, stream=stream))
    found = [one.outputs["prompt_logprobs"] for one in sent if "prompt_logprobs" in one.outputs]
    assert len(found) == 1 and found[0].shape == (1,)
    assert not any("prompt_logprobs" in one.outputs for one in without)
    first, *others = json.loads(found[0][0])
    assert first is None and [next(iter(one)) for one in others] == [str(token) for token in ids[2:]]
    tokenizer = byte_level()
    for token, one in zip(ids[2:], others):
        own = one[str(token)]
        assert own["logprob"] == pytest.approx(-np.log(600)) and own["rank"] == 600
        assert own["decoded_token"] == tokenizer.decode([token]) and len(one) in (2, 3)


def test_prompt_logprobs_beyond_the_limit_of_logits_is_refused_by_its_name(repository):
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=EOS, start_id=EOS, max_logits_bytes=5_000)
    parameters = {"tokenizer_dir": "bytes"}
    settings = fake_triton.model_config("vllm", {}, OUTPUTS, parameters, True, 0)
    with running(TritonPythonModel, settings, FakeEngine(limits=limits), repository) as door:
        _, text = refusal(ask(door, tensors("Hello streaming", {"prompt_logprobs": 0})))
    assert "prompt_logprobs: 1 rows of" in text and "max_logits_bytes" in text


# ---------------------------------------------------------------- sampling parameters


def test_the_defaults_are_vllms(door):
    only(ask(door, {"text_input": array_of("Hello")}))
    params = last_params(door)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 1.0, 0, 1.0)
    assert params.end_id == EOS and params.min_tokens == 0 and params.stop_words == []


def test_each_request_without_a_seed_draws_its_own(door):
    seeds = {params_for(door).seed for _ in range(8)} | {params_for(door, seed=-1).seed}
    assert len(seeds) == 9
    assert params_for(door, seed=7).seed == 7 and params_for(door, seed="-2").seed == 2**64 - 2


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"temperature": 0, "top_k": 50, "top_p": 0.5}, {"top_k": 1, "temperature": 1.0, "top_p": 1.0}),
        ({"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}, {"temperature": 0.1, "top_p": 0.95}),
        ({"temperature": 0.001}, {"temperature": 0.01, "top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 600}),
        ({"top_k": 5.0, "min_tokens": "1"}, {"top_k": 5, "min_tokens": 1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5, "count_prompt": True}),
        (
            {"presence_penalty": 1, "frequency_penalty": -0.5, "temperature": 0.5},
            {"presence_penalty": 2.0, "frequency_penalty": -1.0, "count_prompt": False},
        ),
        ({"presence_penalty": 1, "temperature": 0}, {"presence_penalty": 1.0}),
        ({"stop_token_ids": [5, "7"]}, {"end_id": EOS, "more_end_ids": [5, 7]}),
        ({"ignore_eos": "true"}, {"end_id": -1}),
        ({"logprobs": None, "n": 1, "best_of": 1, "min_p": None, "logit_bias": {}, "lora_name": None}, {}),
        ({"min_p": "0.25", "detokenize": "True", "spaces_between_special_tokens": True}, {"min_p": 0.25}),
        ({"logit_bias": {"5": 1, "7": -100.0}}, {"logit_bias": {5: 1.0, 7: -100.0}}),
        ({"allowed_token_ids": [9, "5", 9]}, {"allowed_token_ids": [9, 5]}),
        ({"no_repeat_ngram_size": "3", "typical_p": 0.5}, {"no_repeat_ngram_size": 3, "typical_p": 0.5}),
        ({"typical_p": 0.5, "temperature": 0}, {"typical_p": 1.0, "top_k": 1}),
        ({"min_p": 0.5, "temperature": 0}, {"min_p": 0.0, "top_k": 1}),
        ({}, {"cache": "on", "cache_salt": ""}),
        ({"cache": "off", "cache_salt": "mine"}, {"cache": "off", "cache_salt": "mine"}),
        ({"skip_reading_prefix_cache": True}, {"cache": "write"}),
        ({"skip_reading_prefix_cache": "false"}, {"cache": "on"}),
    ],
    ids=str,
)
def test_keys_become_the_engines_parameters(door, sent, found):
    params = params_for(door, **sent)
    assert {name: getattr(params, name) for name in found} == found


def test_a_lora_adapter_is_named_among_the_sampling_parameters(door):
    params_for(door, lora_name="french")
    assert door.test_engine.submits[-1].sequences[0].lora_name == "french"


def test_request_parameters_count_without_the_tensor_and_not_beside_it(door):
    arrays = {"text_input": array_of("Hello")}
    sent = {"temperature": "0", "max_tokens": 3}
    only(ask(door, arrays, parameters=sent))
    assert last_params(door).max_tokens == 3 and last_params(door).top_k == 1
    only(ask(door, tensors(sampling={"max_tokens": 2}), parameters=sent))
    assert last_params(door).max_tokens == 2 and last_params(door).top_k == 0
    code, text = refusal(ask(door, arrays, parameters={"temprature": 0}))
    assert code == "INVALID_ARG" and text.endswith("did you mean temperature?")


def test_the_answer_is_cut_to_the_room_that_the_prompt_leaves(door):
    only(ask(door, tensors("Hello", {"max_tokens": 10**6})))
    assert last_params(door).max_tokens == LIMITS.max_sequence_tokens - len(ids_of("Hello"))
    code, text = refusal(ask(door, tensors("fox " * 600)))
    assert code == "INVALID_ARG" and "text_input has" in text and "accepts 512 in all" in text
    only(ask(door, tensors("fox " * 600, {"truncate_prompt_tokens": 7, "max_tokens": 1})))
    prompt = np.frombuffer(door.test_engine.submits[-1].sequences[0].prompt, "<i4").tolist()
    assert prompt == ids_of("fox " * 600)[-7:]
    only(ask(door, tensors("fox " * 600, {"truncate_prompt_tokens": -1})))
    assert last_params(door).max_tokens == 1


def test_stop_texts_end_the_answer_and_can_be_shown(door):
    def answer(**sampling):
        arrays = tensors("Hello", {"max_tokens": 100, **sampling}, exclude_input_in_output=True)
        return text_of(only(ask(door, arrays)))

    assert answer(stop="hello") == " world, "
    assert answer(stop=["", "xyz", "京 t"]) == ANSWER.split("京 t")[0]
    assert answer(stop="hello", include_stop_str_in_output=True) == " world, hello"
    tokens = len(byte_level().encode(" world, hello", add_special_tokens=False).ids)
    assert answer(stop=["hello", "text"], min_tokens=tokens) == ANSWER.split("text")[0]


def test_a_stop_token_is_hidden_unless_it_is_wanted(door):
    comma = ids_of(ANSWER)[1]
    shown = byte_level().decode(ids_of(ANSWER)[:2])
    hidden = byte_level().decode(ids_of(ANSWER)[:1])
    for include, wanted in ((False, hidden), (True, shown)):
        sampling = {"stop_token_ids": [comma], "include_stop_str_in_output": include}
        outputs = only(ask(door, tensors("Hello", sampling, exclude_input_in_output=True)))
        assert text_of(outputs) == wanted


def test_a_stop_token_does_not_end_the_answer_before_min_tokens(repository):
    a, b, c = ids_of("a"), ids_of("b"), ids_of("c")
    for config in ({}, {"stop_ids": str(a[0])}):
        with serving(repository, [*a, *b, *a, *b, *a, *c, EOS], config=config) as door:
            own = {} if config else {"stop_token_ids": a}
            for more, wanted in (
                ({"min_tokens": 1}, "ab"),
                ({"min_tokens": 3}, "abab"),
                ({"min_tokens": 2, "include_stop_str_in_output": True}, "aba"),
                ({"min_tokens": 0}, ""),
            ):
                sampling = {"max_tokens": 9, **own, **more}
                outputs = only(ask(door, tensors("x", sampling, exclude_input_in_output=True, **REASONS)))
                assert text_of(outputs) == wanted and outputs["finish_reason"][0] == b"stop"
                shown = more.get("include_stop_str_in_output", False)
                assert outputs["num_output_tokens"].tolist() == [len(wanted) + (not shown)]
            wait_until(lambda: door.test_engine.running == 0)


def test_special_tokens_can_be_shown(repository):
    with serving(repository, [*ids_of("a"), EOS, *ids_of("b"), EOS]) as door:
        for skip, wanted in ((True, "ab"), (False, "a<|endoftext|>b")):
            sampling = {"ignore_eos": True, "max_tokens": 3, "skip_special_tokens": skip}
            arrays = tensors("x", sampling, exclude_input_in_output=True)
            assert text_of(only(ask(door, arrays))) == wanted


def test_bad_words_reach_the_engine_as_ids(door):
    params = params_for(door, bad_words=["fox", ""])
    assert params.bad_words == [ids_of("fox"), ids_of(" fox")]


# ---------------------------------------------------------------- refusals

_REFUSED = [
    ('{"temperature": "hot"}', "INVALID_ARG", 'temperature is "hot"; wanted a number from 0 to 1e+06'),
    ('{"temperature": NaN}', "INVALID_ARG", "has the value NaN; wanted a finite number"),
    ('{"temperature": 1e999}', "INVALID_ARG", "temperature is Infinity"),
    ('{"temperature": "nan"}', "INVALID_ARG", 'temperature is "nan"'),
    ('{"temperature": true}', "INVALID_ARG", "temperature is true"),
    ('{"temperature": [0.5]}', "INVALID_ARG", "temperature is [0.5]"),
    ('{"top_p": 0}', "INVALID_ARG", "top_p is 0; wanted a number in (0, 1]"),
    ('{"top_p": 1.5}', "INVALID_ARG", "top_p is 1.5"),
    ('{"repetition_penalty": 0}', "INVALID_ARG", "repetition_penalty is 0"),
    ('{"presence_penalty": -2.1}', "INVALID_ARG", "presence_penalty is -2.1; wanted a number from -2 to 2"),
    ('{"max_tokens": 0}', "INVALID_ARG", "max_tokens is 0; wanted a whole number from 1 to 2147483647"),
    ('{"max_tokens": 1.5}', "INVALID_ARG", "max_tokens is 1.5"),
    ('{"max_tokens": ' + "9" * 4000 + "}", "INVALID_ARG", "max_tokens is a number of"),
    ('{"max_tokens": ' + "9" * 5000 + "}", "INVALID_ARG", "a number has too many digits"),
    ('{"max_tokens": 2, "min_tokens": 3}', "INVALID_ARG", "min_tokens is 3 and max_tokens is 2"),
    ('{"logprobs": 21}', "INVALID_ARG", "logprobs is 21; wanted a whole number from 0 to 20"),
    ('{"top_k": 5, "top_k": 6}', "INVALID_ARG", 'has the key "top_k" twice'),
    ('{"topk": 5}', "INVALID_ARG", 'has the key "topk", which is unknown; did you mean top_k?'),
    ('{"' + "x" * 500 + '": 1}', "INVALID_ARG", "which is unknown"),
    ("[1]", "INVALID_ARG", "sampling_parameters is a list; wanted a JSON object"),
    ("null", "INVALID_ARG", "sampling_parameters is null"),
    ("{", "INVALID_ARG", "is not valid JSON"),
    ('{"stop": ' + "[" * 20_000 + "]" * 20_000 + "}", "INVALID_ARG", "nested too deeply"),
    ('{"stop": ["a", 1]}', "INVALID_ARG", 'stop is ["a", 1]; wanted a text or a list of texts'),
    ('{"stop": "\\ud800"}', "INVALID_ARG", "stop is not valid UTF-8"),
    (json.dumps({"stop": [str(i) for i in range(300)]}), "INVALID_ARG", "stop has 300 words"),
    (json.dumps({"bad_words": [f"w{i}" for i in range(2000)]}), "INVALID_ARG", "bad_words has 2,000 words"),
    (json.dumps({"stop_token_ids": list(range(5000))}), "INVALID_ARG", "stop_token_ids has 5,000 items"),
    ('{"stop_token_ids": [600]}', "INVALID_ARG", "stop_token_ids has 600; wanted token ids below 600"),
    ('{"stop_token_ids": [-1]}', "INVALID_ARG", "stop_token_ids is -1"),
    (b'{"stop": "\xff"}', "INVALID_ARG", "sampling_parameters is not valid UTF-8"),
    ('{"seed": 1' + " " * 70_000 + "}", "INVALID_ARG", "sampling_parameters has 70,011 bytes"),
    ('{"lora_name": "' + "x" * 200 + '"}', "INVALID_ARG", "lora_name is"),
    ('{"n": 0}', "INVALID_ARG", "n is 0"),
    ('{"cache": "never"}', "INVALID_ARG", "cache is 'never'; wanted one of on, write, off"),
    ('{"cache": true}', "INVALID_ARG", "cache is true; wanted on, write or off"),
    ('{"cache_salt": "' + "é" * 129 + '"}', "INVALID_ARG", "cache_salt has 258 bytes; wanted 256 at most"),
    ('{"min_p": 1.5}', "INVALID_ARG", "min_p is 1.5; wanted a number from 0 to 1"),
    ('{"n": 3, "best_of": 2}', "INVALID_ARG", "best_of is 2 and n is 3"),
    ('{"best_of": 2, "temperature": 0}', "INVALID_ARG", "best_of is 2 and the answer is greedy"),
    ('{"n": 2, "temperature": 0}', "INVALID_ARG", "n is 2 and the answer is greedy"),
    ('{"n": 65}', "INVALID_ARG", "n is 65; wanted a whole number from 1 to 64"),
    ('{"prompt_logprobs": -1}', "INVALID_ARG", "prompt_logprobs is -1"),
    ('{"prompt_logprobs": 21}', "INVALID_ARG", "prompt_logprobs is 21"),
    ('{"logit_bias": {"5": 101}}', "INVALID_ARG", "logit_bias is 101; wanted a JSON object"),
    ('{"logit_bias": {"5": "1"}}', "INVALID_ARG", 'logit_bias is {"5": "1"}; wanted a JSON object'),
    ('{"logit_bias": {"x": 1}}', "INVALID_ARG", 'logit_bias is {"x": 1}'),
    ('{"logit_bias": {"600": 1}}', "INVALID_ARG", "logit_bias has '600'; wanted token ids below 600"),
    ('{"logit_bias": {"-1": 1}}', "INVALID_ARG", "logit_bias has '-1'"),
    ('{"logit_bias": [5]}', "INVALID_ARG", "logit_bias is [5]"),
    ('{"logit_bias": {"5": NaN}}', "INVALID_ARG", "the value NaN"),
    ('{"allowed_token_ids": []}', "INVALID_ARG", "allowed_token_ids is empty"),
    ('{"allowed_token_ids": [600]}', "INVALID_ARG", "allowed_token_ids has 600; wanted token ids below 600"),
    ('{"no_repeat_ngram_size": 65}', "INVALID_ARG", "no_repeat_ngram_size is 65"),
    ('{"typical_p": 0}', "INVALID_ARG", "typical_p is 0; wanted a number in (0, 1]"),
    ('{"detokenize": false}', "UNSUPPORTED", "detokenize is false"),
    ('{"structured_outputs": 3}', "INVALID_ARG", "sampling_parameters: structured_outputs is 3; wanted"),
    ('{"structured_outputs": {"jsn": {}}}', "INVALID_ARG", 'structured_outputs has the unknown key "jsn"'),
    ('{"structured_outputs": "{"}', "INVALID_ARG", 'structured_outputs is "{"; wanted a JSON object'),
    ('{"guided_regex": ""}', "INVALID_ARG", 'guided_regex is ""; wanted a regular expression'),
    ('{"guided_regex": "\\ud800"}', "INVALID_ARG", "guided_regex has a regex that is not valid UTF-8"),
    ('{"guided_choice": ["a", 3]}', "INVALID_ARG", "guided_choice[1] is 3; wanted a text"),
    ('{"guided_json": {}, "guided_regex": "a"}', "INVALID_ARG", "are both sent; wanted one of them"),
    ('{"ignore_eos": "maybe"}', "INVALID_ARG", 'ignore_eos is "maybe"; wanted true or false'),
    ('{"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}', "UNSUPPORTED",
     "structured_outputs.whitespace_pattern is"),
    (
        '{"repetition_penalty": 1.1, "presence_penalty": 1}',
        "UNSUPPORTED",
        "repetition_penalty is 1.1 with a presence_penalty",
    ),
]  # fmt: skip


#: sampling_parameters -> the engine's constraint
_CONSTRAINTS: list[tuple[dict, StructuredOutput | None]] = [
    ({"structured_outputs": {"json": {"type": "object"}}},
     StructuredOutput("json_schema", '{"type": "object"}')),
    ({"structured_outputs": '{"regex": "[a-z]+", "choice": null}'}, StructuredOutput("regex", "[a-z]+")),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, StructuredOutput("json")),
    ({"guided_decoding": {"choice": ["a", "港"], "backend": "auto"}},
     StructuredOutput("choice", '["a", "\\u6e2f"]')),
    ({"guided_json": '{"type": "array"}'}, StructuredOutput("json_schema", '{"type": "array"}')),
    ({"guided_grammar": "start: /a/"}, StructuredOutput("grammar", "start: /a/")),
    ({"structured_outputs": {}, "guided_json": None}, None),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "output"), _CONSTRAINTS)
def test_the_engine_gets_the_constraint_of_an_answer(door, keys, output):
    only(ask(door, tensors(sampling=keys)))
    assert door.test_engine.submits[-1].sequences[0].structured_output == output


def test_an_error_about_a_grammar_names_the_field_of_the_client(repository):
    with serving(repository, grammar_fault="this engine has no grammars") as door:
        code, text = refusal(ask(door, tensors(sampling={"structured_outputs": {"regex": "x"}})))
    assert code == "UNSUPPORTED"
    assert text == "sampling_parameters: structured_outputs is regex, and this engine has no grammars"


@pytest.mark.parametrize(("sent", "code", "text"), _REFUSED, ids=[str(case[2])[:30] for case in _REFUSED])
def test_what_cannot_be_served_is_refused_by_name(door, sent, code, text):
    before = len(door.test_engine.submits)
    found = refusal(ask(door, tensors(sampling=sent)))
    assert found[0] == code and text in found[1] and len(found[1]) < 300
    assert len(door.test_engine.submits) == before


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"text_input": np.array([b"a", b"b"], object)}, "text_input has 2 texts; wanted one"),
        ({"sampling_parameters": np.array([b"{}", b"{}"], object)}, "sampling_parameters has 2 texts"),
        ({"image": array_of("x")}, "image was sent"),
        ({"embedding_request": array_of("{}")}, "embedding_request was sent"),
        ({"stream": np.array([1], np.int32)}, "stream has the type INT32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_cannot_be_served_are_refused_by_name(door, arrays, text):
    assert text in refusal(ask(door, {**tensors(), **arrays}))[1]


def test_a_model_that_is_not_decoupled_refuses_to_stream(repository):
    with serving(repository, decoupled=False) as door:
        assert "this model cannot stream" in refusal(ask(door, tensors(stream=True)))[1]
        assert text_of(only(ask(door, tensors("Hello")))) == "Hello" + ANSWER


def test_a_client_that_leaves_frees_the_sequence(repository):
    with serving(repository, step_s=0.01, says=ids_of(" a")) as door:
        request = fake_triton.InferenceRequest(tensors(sampling={"max_tokens": 400}, stream=True))
        door.execute([request])
        wait_until(lambda: len(request.sender.sent) > 2)
        request.cancel()
        assert request.sender.wait(60)
        wait_until(lambda: door.test_engine.running == 0)


def test_every_key_of_the_table_is_documented_or_refused():
    for key in KEYS:
        assert key.refused != bool(key.meaning), key.name
        assert key.refused or key.default, key.name
    assert KEYS_BY_NAME["lora_name"].high == MAX_LORA_NAME
