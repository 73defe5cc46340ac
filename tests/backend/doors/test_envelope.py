"""Size limits of a request: every door refuses it by name, before any work."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine
from tests.waiting import interpreter_gaps, wait_until
from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors import fastertransformer, postprocessing, preprocessing, text
from tridecode.backend.doors.requests.word_lists import read_word_list
from tridecode.backend.service.error_texts import public_text
from tridecode.backend.service.limits import MAX_TIMEOUT_S, whole_number
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.backend.wire.sampling_params import check as check_params

DOOR_LIMITS = msgspec.structs.replace(LIMITS, vocab_size=600, start_id=1, end_id=2, max_queued_requests=1024)
FT_OUTPUTS = {"output_ids": "TYPE_UINT32", "sequence_length": "TYPE_UINT32"}
SMALL = {"max_response_elements": "20000", "max_stream_elements": "200000"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    byte_level().save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return root


def text_door(repository, decoupled=False, step_s=0.0, limits=DOOR_LIMITS, **parameters):
    config = fake_triton.model_config(
        "text", {}, {"text_output": "TYPE_STRING"}, {"tokenizer_dir": ".", **parameters}, decoupled
    )
    return running(text.TritonPythonModel, config, FakeEngine(limits=limits, step_s=step_s), repository)


def token_door(decoupled=False, **parameters):
    config = fake_triton.model_config("fastertransformer", {}, FT_OUTPUTS, {**SMALL, **parameters}, decoupled)
    return running(fastertransformer.TritonPythonModel, config, FakeEngine(limits=DOOR_LIMITS))


def unary(module, name: str, outputs: dict, repository, **parameters):
    config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": ".", **parameters})
    door = module.TritonPythonModel()
    door.initialize(fake_triton.initialize_arguments(config, f"{repository}"))
    return door


@pytest.fixture(scope="module")
def texts(repository) -> Iterator:
    with text_door(repository) as door:
        yield door


@pytest.fixture(scope="module")
def tokens() -> Iterator:
    with token_door() as door:
        yield door


@pytest.fixture(scope="module")
def streamed_tokens() -> Iterator:
    with token_door(decoupled=True) as door:
        yield door


def strings(rows: list[list[bytes]]) -> np.ndarray:
    array = np.empty((len(rows), len(rows[0])), object)
    for index, row in enumerate(rows):
        array[index] = row
    return array


def prompt(*rows: bytes, **others: np.ndarray) -> dict[str, np.ndarray]:
    counts = np.full((len(rows), 1), 2, np.int32)
    return {"text_input": strings([[row] for row in rows]), "max_tokens": counts, **others}


def ids(rows: int, width: int, new: int, **others: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.full((rows, width), 5, np.uint32),
        "input_lengths": np.ones((rows, 1), np.uint32),
        "request_output_len": np.full((rows, 1), new, np.uint32),
        **others,
    }


def ask(door, arrays, **request) -> list[fake_triton.Sent]:
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def column(*values, kind=np.int32) -> np.ndarray:
    return np.array(values, kind)[:, None]


MANY = [f"word{i}".encode() for i in range(20_000)]
TEXT_TOO_LARGE = {
    "a prompt": (prompt(b"x" * 65_537), "text_input has 65,537 bytes; this model accepts 65,536"),
    "one prompt of two": (prompt(b"a", b"x" * 65_537), "text_input of row 1 has 65,537 bytes"),
    "all prompts": (prompt(*[b"x" * 60_000] * 70), "the request has 4,200,000 bytes of text"),
    "rows": (prompt(*[b"x"] * 1025), "text_input has shape [1025, 1]"),
    "texts a row": (
        prompt(b"x", text_input=strings([[b"x"] * 1025])),
        "text_input has shape [1, 1025]",
    ),
    "values of an option": (prompt(b"x", top_k=np.zeros((1, 1025), np.int32)), "top_k has shape [1, 1025]"),
    "an empty option": (
        prompt(b"x", temperature=np.zeros((1, 2**40, 0), np.float32)),
        "temperature has shape",
    ),
    "bad words": (prompt(b"x", bad_words=strings([MANY])), "bad_words has 20,000 words"),
    "bad words a row": (prompt(b"x", bad_words=strings([MANY[:1025]])), "bad_words has 1,025 words a row"),
    "bytes of bad words": (
        prompt(b"x", bad_words=strings([[b"x" * 20_000]])),
        "bad_words has 20,000 bytes a row",
    ),
    "bytes of all bad words": (
        prompt(*[b"x"] * 20, bad_words=strings([[b"x" * 16_000]] * 20)),
        "bad_words has 320,000 bytes; this model accepts 262,144 in a request",
    ),
    "stop words": (prompt(b"x", stop_words=strings([MANY[:257]])), "stop_words has 257 words"),
}


@pytest.mark.parametrize("case", TEXT_TOO_LARGE)
def test_a_text_request_that_is_too_large_is_refused_at_once(texts, monkeypatch, case):
    arrays, found = TEXT_TOO_LARGE[case]
    monkeypatch.setattr(texts.texts, "_tokenise", None)  # nothing was tokenised
    began = time.monotonic()
    code, said = refusal(ask(texts, arrays))
    assert (code, found in said) == ("INVALID_ARG", True), said
    assert time.monotonic() - began < 1.0


TOKENS_TOO_LARGE = {
    "a width": (ids(1, 513, 1), "input_ids has a width of 513; this model accepts 512"),
    "all ids": (ids(60, 400, 1), "input_ids has shape [60, 400]; this model accepts 20,000 elements"),
    "a response": (ids(40, 400, 100), "40 rows of 400 ids and 100 new tokens make a response of 24,000"),
    "an axis": (
        ids(1, 1, 1, input_ids=np.zeros((2**40, 0), np.uint32)),
        "input_ids has shape [1099511627776, 0]",
    ),
    "lengths": (ids(1, 1, 1, input_lengths=np.ones((1025, 1), np.uint32)), "input_lengths has shape"),
    "a word list": (
        ids(1, 1, 1, bad_words_list=np.full((1, 2, 16_385), -1, np.int32)),
        "bad_words_list has shape [1, 2, 16385]",
    ),
    "word lists": (
        ids(8, 1, 1, stop_words_list=np.full((8, 2, 2000), -1, np.int32)),
        "stop_words_list has shape [8, 2, 2000]; this model accepts 20,000 elements",
    ),
    "embeddings": (
        ids(1000, 2, 8, is_return_context_embeddings=np.ones((1000, 1), bool)),
        "make a response of 22,000 elements",
    ),
}


@pytest.mark.parametrize("case", TOKENS_TOO_LARGE)
def test_a_request_of_token_ids_that_is_too_large_is_refused(tokens, case):
    arrays, found = TOKENS_TOO_LARGE[case]
    code, said = refusal(ask(tokens, arrays))
    assert (code, found in said) == ("INVALID_ARG", True), said


def test_a_padded_batch_of_the_models_full_width_is_served(tokens):
    out = only(ask(tokens, ids(30, 512, 20)))
    assert out["output_ids"].shape == (30, 1, 532)


def test_what_a_stream_sends_is_bounded(streamed_tokens):
    code, said = refusal(ask(streamed_tokens, ids(30, 400, 50)))
    assert code == "INVALID_ARG"
    assert "50 responses of 15,000 elements each are 750,000; this model accepts 200,000" in said
    assert len(ask(streamed_tokens, ids(10, 100, 50))) == 50


# ---------------------------------------------------------------- malformed tensors

PRIORITIES = [1e300, -1e300, 2**31, -(2**31) - 1, 2**63, 2**64, 10**400, float("inf"), float("nan"), 1.5]


@pytest.mark.parametrize("value", [*PRIORITIES, True, None, "abc", "9" * 50, [1], {}])
def test_a_priority_that_no_message_carries_is_refused_and_nobody_else_notices(texts, value):
    other = fake_triton.InferenceRequest(prompt(b"x"))
    texts.execute([other])
    code, said = refusal(ask(texts, prompt(b"hello"), parameters={"priority": value}))
    assert code == "INVALID_ARG" and "priority is " in said and len(said) < 200
    assert other.sender.wait(60) and not other.sender.sent[0].error


@pytest.mark.parametrize("value", [0, -5, 2**31 - 1, -(2**31), "7", 3.0])
def test_a_priority_may_be_a_request_parameter(texts, value):
    only(ask(texts, prompt(b"hello"), parameters={"priority": value}))
    assert texts.test_engine.submits[-1].priority == int(value)


def test_each_text_has_a_priority_of_its_own(texts):
    only(ask(texts, prompt(b"a", b"b", b"c", priority=column(3, -1, 2))))
    assert [submit.priority for submit in texts.test_engine.submits[-3:]] == [3, -1, 2]


def test_the_rows_of_one_engine_request_have_one_priority(tokens):
    only(ask(tokens, ids(3, 2, 1, priority=column(4, 4, 4))))
    assert tokens.test_engine.submits[-1].priority == 4
    code, said = refusal(ask(tokens, ids(3, 2, 1, priority=column(4, 4, 5))))
    assert code == "INVALID_ARG" and "priority differs between the rows" in said


def test_request_parameters_are_bounded_before_they_are_parsed(texts):
    many = {f"triton_{index}": index for index in range(65)}
    for parameters, found in (
        (many, "65 request parameters were sent"),
        ({"triton_x": "x" * 70_000}, "of JSON; this model accepts 65,536"),
        ({"x" * 60_000: 1}, "is unknown to this model"),
    ):
        code, said = refusal(ask(texts, prompt(b"x"), parameters=parameters))
        assert code == "INVALID_ARG" and found in said and len(said) < 300


def test_an_input_that_is_not_implemented_is_refused_as_such_when_it_comes_as_a_parameter(texts):
    """HTTP's generate endpoint sends the inputs that config.pbtxt does not declare as parameters."""
    code, said = refusal(ask(texts, prompt(b"x"), parameters={"retention_decode_priority": 3}))
    assert code == "UNSUPPORTED"
    assert said == "retention_decode_priority was sent, which this version does not implement; leave it out"
    only(ask(texts, prompt(b"x"), parameters={"use_draft_logits": False}))


@pytest.mark.parametrize("json_text", ["[" * 60_000, "[1]", "{", '{"a": ' + "1" * 5000 + "}", "nan"])
def test_request_parameters_that_are_no_json_object_are_refused(texts, monkeypatch, json_text):
    monkeypatch.setattr(fake_triton.InferenceRequest, "parameters", lambda self: json_text)
    code, said = refusal(ask(texts, prompt(b"x")))
    assert code == "INVALID_ARG" and "request parameter" in said


def no_utf8(self) -> str:
    return b"/srv/models/\xff".decode("utf-8")


@pytest.mark.parametrize("method", ["request_id", "parameters"])
def test_an_id_that_is_not_utf8_is_one_clean_error_at_every_door(
    repository, texts, tokens, monkeypatch, method
):
    """Triton's utilities raise UnicodeDecodeError when such a text is read."""
    pre = unary(preprocessing, "preprocessing", {}, repository)
    monkeypatch.setattr(fake_triton.InferenceRequest, method, no_utf8)
    for door, arrays in (
        (texts, prompt(b"x")),
        (tokens, ids(1, 1, 1)),
        (pre, {"QUERY": strings([[b"x"]])}),
    ):
        code, said = refusal(ask(door, arrays))
        assert code == "INVALID_ARG" and "not valid UTF-8" in said and "/" not in said


@pytest.mark.parametrize("label", ["x" * 1025, "\ud800"])
def test_an_id_that_no_message_carries_is_refused(texts, label):
    for request in ({"request_id": label}, {"parameters": {"id": label}}):
        code, said = refusal(ask(texts, prompt(b"x"), **request))
        assert code == "INVALID_ARG" and "request id" in said


def test_a_timeout_of_a_century_is_thirty_days(texts):
    only(ask(texts, prompt(b"x"), timeout_us=2**64 - 1))
    assert texts.test_engine.submits[-1].timeout_s == MAX_TIMEOUT_S


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k"])
def test_counts_of_the_engine_fit_an_int32(name):
    assert check_params(SamplingParams(**{name: 2**31 - 1})) is None
    assert f"{name} is {2**31}; wanted 0" in (check_params(SamplingParams(**{name: 2**31})) or "")


# ---------------------------------------------------------------- unary doors


def test_preprocessing_bounds_texts_words_and_padding(repository):
    outputs = {"INPUT_ID": "TYPE_UINT32", "BAD_WORDS_IDS": "TYPE_INT32"}
    door = unary(
        preprocessing, "preprocessing", outputs, repository,
        max_prompt_bytes="5000", max_request_bytes="60000", max_response_elements="20000",
    )  # fmt: skip

    def query(*rows: bytes, words: bytes = b"") -> dict[str, np.ndarray]:
        arrays = {"QUERY": strings([[row] for row in rows]), "BAD_WORDS_DICT": strings([[words]] * len(rows))}
        return {**arrays, "REQUEST_OUTPUT_LEN": np.ones((len(rows), 1), np.uint32)}

    for arrays, found in (
        (query(b"x" * 5001), "QUERY has 5,001 bytes; this model accepts 5,000 (max_prompt_bytes"),
        (query(*[b"x" * 4000] * 20), "the request has 80,000 bytes of text"),
        (query(b"x " * 2000, *[b"x"] * 30), "QUERY has 31 rows, and padded to the longest"),
        (query(b"x", words=b"ab," * 8000), "BAD_WORDS_DICT has 24,000 bytes; this model accepts 16,384"),
        (query(b"x", words=b"a," * 2000), "BAD_WORDS_DICT of row 0 has 2,000 words"),
    ):
        code, said = refusal(ask(door, arrays))
        assert code == "INVALID_ARG" and found in said, said
    assert not ask(door, query(b"x", b"y", words=b"a,b"))[0].error


def test_postprocessing_bounds_its_ids_and_needs_no_lengths(repository):
    door = unary(
        postprocessing, "postprocessing", {"OUTPUT": "TYPE_STRING"}, repository, max_response_elements="1000"
    )
    for shape in ((1, 1, 1001), (2**40, 1, 0), (1001, 1, 0)):
        code, said = refusal(ask(door, {"TOKENS_BATCH": np.zeros(shape, np.uint32)}))
        assert code == "INVALID_ARG" and "TOKENS_BATCH has shape" in said
    assert ask(door, {"TOKENS_BATCH": np.zeros((1, 1, 1000), np.uint32)})[0].error is None


# ---------------------------------------------------------------- time


def test_words_are_read_in_linear_time(texts, monkeypatch):
    limits = msgspec.structs.replace(DOOR_LIMITS, max_bad_word_tokens=10**6)
    monkeypatch.setattr(texts.link, "limits", lambda: limits)
    words = strings([MANY[:16_000]])
    began = time.monotonic()
    only(ask(texts, prompt(b"x", bad_words=words)))
    assert time.monotonic() - began < 5.0  # 20,000 words took 12 s
    params = texts.test_engine.submits[-1].sequences[0].params
    assert len(params.bad_words) == 2 * 16_000
    tensor = np.stack([np.zeros(16_384, np.int32), np.arange(1, 16_385, dtype=np.int32)])[None]
    assert len(read_word_list(np.tile(tensor, (16, 1, 1)), 16, "bad", 600)[15]) == 16_384


def test_a_door_lives_and_answers_while_it_tokenises_large_prompts(repository):
    """Heartbeats need the interpreter; a small request needs a thread that is not busy."""
    limits = msgspec.structs.replace(DOOR_LIMITS, max_sequence_tokens=10**7)
    with text_door(repository, limits=limits, max_prompt_bytes="3000000") as door:
        large = [fake_triton.InferenceRequest(prompt(b"the quick brown fox " * 100_000)) for _ in range(8)]
        try:
            with interpreter_gaps() as gaps:
                began = time.monotonic()
                door.execute(large)
                took = time.monotonic() - began
                slowest = 0.0
                for _ in range(20):
                    began = time.monotonic()
                    only(ask(door, prompt(b"hello")))
                    slowest = max(slowest, time.monotonic() - began)
                assert not any(request.sender.wait(0) for request in large[4:])  # still being prepared
        finally:
            for request in large:
                request.cancel()
        assert took < 1.0 and slowest < 1.0 and max(gaps) < 1.0, (took, slowest, max(gaps))


def test_a_request_that_is_cancelled_while_it_is_prepared_reaches_no_engine(repository):
    limits = msgspec.structs.replace(DOOR_LIMITS, max_sequence_tokens=10**7)
    with text_door(
        repository, limits=limits, max_prompt_bytes="3000000", max_request_bytes="30000000"
    ) as door:
        request = fake_triton.InferenceRequest(prompt(*[b"the quick brown fox " * 20_000] * 20))
        door.execute([request])
        request.cancel()
        assert request.sender.wait(60) and request.sender.sent[0].error.code() == 7
        wait_until(lambda: door.preparation.pending == 0)
        assert door.test_engine.submits == [] and door.senders.open_streams() == []


def test_a_stop_request_finds_one_that_is_being_prepared(repository):
    limits = msgspec.structs.replace(DOOR_LIMITS, max_sequence_tokens=10**7)
    with text_door(repository, limits=limits, max_prompt_bytes="3000000", step_s=0.01) as door:
        arrays = prompt(b"the quick brown fox " * 50_000, max_tokens=column(500))
        request = fake_triton.InferenceRequest(arrays, request_id="mine")
        door.execute([request])
        only(ask(door, prompt(b"", stop=np.array([[True]])), request_id="mine"))
        assert request.sender.wait(60) and request.sender.sent[0].error is None
        assert request.sender.sent[0].outputs["text_output"][0].startswith(b"the quick brown fox")
        wait_until(lambda: door.test_engine.running == 0)


def test_what_is_being_prepared_is_bounded_and_ends_with_the_door(repository):
    limits = msgspec.structs.replace(DOOR_LIMITS, max_sequence_tokens=10**7)
    large = [fake_triton.InferenceRequest(prompt(b"the quick brown fox " * 50_000)) for _ in range(12)]
    settings = {"max_prompt_bytes": "3000000", "max_preparing_bytes": "5000000"}
    before = set(threading.enumerate())
    with text_door(repository, limits=limits, **settings) as door:
        door.execute(large)
        refused = [request for request in large if request.sender.wait(0.2) and request.sender.sent[0].error]
        assert refused and "are being prepared already" in refused[0].sender.sent[0].error.message()
        assert refused[0].sender.sent[0].error.code() == fake_triton.TritonError.UNAVAILABLE
        only(ask(door, prompt(b"hello")))
    for request in large:
        assert request.sender.wait(60)
    assert not [t for t in threading.enumerate() if t.name.startswith("prepare-") and t not in before]


# ---------------------------------------------------------------- texts of errors


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/models/fastertransformer/config.pbtxt: parameter x", "config.pbtxt: parameter x"),
        ("cannot read '/srv/a b/x' (no such file)", None),
        ("see file /tmp/x/", "see file a directory"),
        ("wanted [B, 1]; found 1/2 and http://host/a/b", "wanted [B, 1]; found 1/2 and http://host/a/b"),
        ("half \ud800 a pair", "half ? a pair"),
    ],
)
def test_an_error_shows_no_directory_of_the_server(text, shown):
    found = public_text(text)
    assert "/srv" not in found and (shown is None or found == shown)


def test_a_fault_of_ours_tells_its_type_and_the_request_and_no_path(texts, monkeypatch):
    def fail(*_):
        raise OSError(2, "No such file", "/srv/models/secret/tokenizer.json")

    monkeypatch.setattr(texts, "_read_params", fail)
    code, said = refusal(ask(texts, prompt(b"x"), request_id="mine"))
    assert code == "INTERNAL" and said.startswith("the door failed: FileNotFoundError (request 'mine')")
    assert "/srv" not in said and "secret" not in said


def test_whole_numbers():
    assert whole_number("n", np.int64(5), 0, 9, "") == 5
    with pytest.raises(RequestError, match="n is 10; wanted a whole number from 0 to 9"):
        whole_number("n", 10, 0, 9, "a digit")
