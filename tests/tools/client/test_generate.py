"""The streaming client, tested with a server of Triton's protocol whose answers the test chooses."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.backend.base.errors import ConfigError, EngineDownError, RequestError, TridecodeError
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.wire.sampling_params import parameters
from tridecode.tools.client import generate
from tridecode.tools.client.generate import (
    Piece,
    complete_sampling,
    find_text_model,
    grpc_address,
    infer_text,
    print_stream,
    stream_text,
)

TEXT = ("text_input", "max_tokens")
PIECES = [("The", 1), (" quick", 1), (" brown fox", 2)]


def text_model(name: str = "tensorrt_llm_bls", **options) -> FakeModel:
    return FakeModel(name, TEXT, text_responses(PIECES), **options)


def sent(server, name: str) -> bytes:
    """Return the raw bytes of an input of the last request."""
    request = server.requests[-1]
    index = [tensor.name for tensor in request.inputs].index(name)
    return request.raw_input_contents[index]


def test_pieces_come_as_they_are_written() -> None:
    with fake_server(text_model(gap_s=0.3)) as server:
        started = time.monotonic()
        came = [(piece, time.monotonic() - started) for piece in stream_text(server.url, None, "hello")]
    assert [piece for piece, _ in came] == [Piece(text, tokens) for text, tokens in PIECES]
    assert came[-1][1] - came[0][1] > 0.3


def test_options_travel_as_the_text_models_tensors() -> None:
    with fake_server(text_model()) as server:
        list(
            stream_text(
                server.url, None, "grüß", max_tokens=7, temperature=0.5, seed=2**40, stop_words=["end", "."]
            )
        )
        request = server.requests[-1]
        assert sent(server, "text_input") == (6).to_bytes(4, "little") + "grüß".encode()
        assert np.frombuffer(sent(server, "max_tokens"), np.int32).tolist() == [7]
        assert np.frombuffer(sent(server, "temperature"), np.float32).tolist() == [0.5]
        assert np.frombuffer(sent(server, "seed"), np.uint64).tolist() == [2**40]
        assert sent(server, "stop_words") == b"\x03\0\0\0end\x01\0\0\0."
        assert {tensor.name: tensor.datatype for tensor in request.inputs}["seed"] == "UINT64"
        assert all(list(tensor.shape)[0] == 1 for tensor in request.inputs)
        assert "top_p" not in {tensor.name for tensor in request.inputs}


def test_an_option_that_does_not_exist_is_named() -> None:
    with fake_server(text_model()) as server, pytest.raises(RequestError, match="topk.*top_k"):
        list(stream_text(server.url, None, "hello", topk=3))


def test_a_model_that_was_not_built_is_named_with_the_option_that_builds_it() -> None:
    with fake_server(text_model()) as server:
        wanted = "unknown model: 'ensemble_plain'.*build-repo .*--contract tensorrt_llm_v0.5"
        with pytest.raises(TridecodeError, match=wanted):
            list(stream_text(server.url, "ensemble_plain", "hello"))


def test_an_error_in_mid_stream_has_the_servers_text() -> None:
    with fake_server(text_model(error_after=2)) as server:
        pieces = stream_text(server.url, None, "hello")
        assert [next(pieces).text, next(pieces).text] == ["The", " quick"]
        with pytest.raises(TridecodeError, match="the engine was rebuilt while it held the request"):
            next(pieces)


def test_leaving_the_iterator_cancels_the_request() -> None:
    with fake_server(text_model(never_ends=True)) as server:
        pieces = stream_text(server.url, None, "hello")
        next(pieces)
        pieces.close()
        assert server.cancelled.wait(5.0)


def test_ctrl_c_keeps_what_was_written_and_cancels(capsys) -> None:
    def interrupted(server):
        pieces = stream_text(server.url, None, "hello")
        try:
            yield next(pieces)
            raise KeyboardInterrupt
        finally:
            pieces.close()

    with fake_server(text_model(never_ends=True)) as server:
        assert print_stream(interrupted(server)) is False
        assert server.cancelled.wait(5.0)
    out, err = capsys.readouterr()
    assert out == "The\n"
    assert "cancelled" in err


def test_a_silent_server_is_given_up_after_the_timeout() -> None:
    with fake_server(text_model(never_ends=True)) as server:
        with pytest.raises(EngineDownError, match="silent for 0.3 s"):
            list(stream_text(server.url, None, "hello", timeout_s=0.3))


def test_no_server_is_an_error_that_names_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            EngineDownError, match=f"answers at {url} over gRPC .connection refused"
        ) as caught:
            list(stream_text(url, None, "hello"))
    assert "\n" not in str(caught.value)


def test_first_token_time_and_rate_are_those_of_the_server(capsys) -> None:
    with fake_server(
        FakeModel("tensorrt_llm_bls", TEXT, text_responses([("a", 1)] + [("bb", 2)] * 10), True, 0.3, 0.1)
    ) as server:
        pieces = list(stream_text(server.url, "tensorrt_llm_bls", "warm up"))
        assert len(pieces) == 11
        assert print_stream(stream_text(server.url, "tensorrt_llm_bls", "hello")) is True
    out, err = capsys.readouterr()
    assert out == "a" + "bb" * 10 + "\n"
    first = float(err.split("first token ")[1].split(" ms")[0])
    rate = float(err.split("then ")[1].split(" tokens/s")[0])
    assert 300 <= first < 500
    assert 15 < rate <= 20.5  # 20 tokens in 1 s or a little more
    assert "21 tokens" in err


@pytest.mark.parametrize(("reason", "told"), [("length", True), ("stop", False), (None, False)])
def test_an_answer_that_max_tokens_ends_says_so_and_few_tokens_at_once_have_no_rate(
    capsys, reason, told
) -> None:
    responses = text_responses([("a", 1), ("b", 3)])
    if reason is not None:
        responses[-1]["finish_reason"] = np.array([[reason.encode()]], object)
    with fake_server(FakeModel("tensorrt_llm_bls", TEXT, responses, True)) as server:
        assert print_stream(stream_text(server.url, "tensorrt_llm_bls", "hello")) is True
    err = capsys.readouterr().err
    assert "; 4 tokens" in err and "tokens/s" not in err
    assert ("ended by its length (--max-tokens)" in err) == told


@pytest.mark.parametrize(
    "present, streaming, chosen",
    [
        (["ensemble", "tensorrt_llm_bls"], True, "tensorrt_llm_bls"),
        (["tensorrt_llm_bls", "tensorrt_llm_bls_plain"], False, "tensorrt_llm_bls_plain"),
        (["ensemble"], True, "ensemble"),
    ],
)
def test_the_text_model_is_found_by_its_inputs(present, streaming, chosen) -> None:
    models = [text_model(name, decoupled=not name.endswith("_plain")) for name in present]
    with fake_server(*models) as server:
        assert find_text_model(server.url, streaming=streaming).name == chosen


def test_fastertransformers_ensemble_is_not_taken_for_a_text_model() -> None:
    with fake_server(FakeModel("ensemble", ("INPUT_0", "INPUT_1"))) as server:
        with pytest.raises(RequestError, match="no text model.*ensemble"):
            find_text_model(server.url)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_whole_answer_comes_from_either_kind_of_model(decoupled) -> None:
    model = FakeModel("tensorrt_llm_bls", TEXT, text_responses([("all of it", 3)]), decoupled=decoupled)
    with fake_server(model) as server:
        assert infer_text(server.url, None, "hello", max_tokens=3) == Piece("all of it", 3)
        assert sent(server, "stream") == b"\0"


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("localhost", "localhost:8001"),
        ("localhost:9001", "localhost:9001"),
        ("grpc://there:9001/", "there:9001"),
        ("::1", "[::1]:8001"),
        ("[::1]:9001", "[::1]:9001"),
        (" 10.0.0.7 ", "10.0.0.7:8001"),
    ],
)
def test_an_address_is_completed(typed, address) -> None:
    assert grpc_address(typed) == address


@pytest.mark.parametrize("typed", ["http://localhost:8000", "https://there"])
def test_an_http_address_is_refused_with_the_address_that_is_wanted(typed) -> None:
    with pytest.raises(ConfigError, match=f"{typed} is an HTTPS? address; wanted host:port .*localhost:8001"):
        grpc_address(typed)


@pytest.mark.parametrize("typed", ["", ":8001", "there:", "there:0", "there:99999", "there:eight", "a b"])
def test_what_is_no_address_is_refused(typed) -> None:
    with pytest.raises(ConfigError, match="is not an address; wanted host:port"):
        grpc_address(typed)


@pytest.mark.parametrize(
    ("given", "top_p", "draws"),
    [
        ({}, None, False),
        ({"temperature": 0.7}, 1.0, True),
        ({"temperature": 0.0}, None, False),
        ({"temperature": 0.7, "top_k": 40}, None, True),
        ({"temperature": 0.7, "top_k": 1}, None, False),
        ({"temperature": 0.7, "top_p": 0.5}, 0.5, True),
        ({"top_k": 40}, None, True),
        ({"top_k": 0, "top_p": 0.0}, 0.0, False),
    ],
)
def test_a_temperature_alone_samples_and_a_seed_is_drawn_where_tokens_are(given, top_p, draws) -> None:
    completed = complete_sampling(given)
    assert completed.get("top_p") == top_p
    assert (completed.get("seed") is not None) == draws
    assert complete_sampling({**given, "seed": 7})["seed"] == 7


def test_drawn_seeds_differ() -> None:
    seeds = {complete_sampling({"top_k": 5})["seed"] for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**32 for seed in seeds)


def test_options_are_sent_in_the_dtypes_that_the_model_declares() -> None:
    dtypes = {"text_input": "STRING", "max_tokens": "UINT32", "top_k": "UINT32", "seed": "UINT64"}
    with fake_server(FakeModel("ensemble", tuple(dtypes), text_responses(PIECES), dtypes=dtypes)) as server:
        list(stream_text(server.url, None, "hello", max_tokens=7, top_k=3, seed=5))
        sent_types = {tensor.name: tensor.datatype for tensor in server.requests[-1].inputs}
    assert {name: sent_types[name] for name in dtypes} == {**dtypes, "text_input": "BYTES"}


@pytest.mark.parametrize("options", [{"top_k": 2**40}, {"seed": -1}, {"seed": 2**64}])
def test_a_number_that_its_dtype_does_not_hold_is_refused_before_it_is_sent(options) -> None:
    (name,) = options
    with fake_server(text_model()) as server:
        with pytest.raises(RequestError, match=rf"{name} is .*; wanted .* to .*\(u?int\d+\)"):
            list(stream_text(server.url, None, "hello", **options))
        assert server.requests == []


def test_every_option_of_the_sampling_table_reaches_an_input_of_the_text_models():
    rows = [row for row in parameters() if row.range]
    without = ("early_stopping", "beam_search_diversity_rate")  # not declared by the text models
    options = {row.name: None if row.name in without else row.default for row in rows}
    inputs = generate._inputs("Hello", options, {})
    known = {field.name for field in TENSORRT_LLM.inputs if field.declared and not field.refused}
    sent = {tensor.name() for tensor in inputs}
    assert sent <= known and {"length_penalty", "max_tokens"} <= sent
