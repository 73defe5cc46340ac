"""FasterTransformer's JSON request files: read as its own client reads them, sent over both protocols."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from rich.console import Console

from tests.tools.fake_server import FakeModel, fake_server
from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.tools.client.send_request import read_request, send_request, show, show_streamed

SAMPLE = {
    "config": {"protocol": "grpc", "model_name": "fastertransformer", "stream_api": False},
    "request": [
        {"name": "input_ids", "data": [[9915, 27221, 59], [9915, 27221, 77]], "dtype": "uint32"},
        {"name": "input_lengths", "data": [[3], [3]], "dtype": "uint32"},
        {"name": "request_output_len", "data": [[24], [24]], "dtype": "uint32"},
        {"name": "runtime_top_p", "data": [[0.5], [0.5]], "dtype": "float32"},
        {"name": "random_seed", "data": [[0], [18446744073709551615]], "dtype": "uint64"},
        {"name": "is_return_log_probs", "data": [[True], [False]], "dtype": "bool"},
        {"name": "bad_words_list", "data": [[[0, 0], [-1, -1]]], "dtype": "int32"},
    ],
}
ANSWER = {
    "output_ids": np.array([[[9915, 27221, 59, 17]]], np.uint32),
    "sequence_length": np.array([[4]], np.uint32),
    "cum_log_probs": np.array([[-0.6931472]], np.float32),
}


def written(folder, content) -> str:
    path = folder / "request.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_tensors_have_the_files_names_shapes_and_dtypes(tmp_path) -> None:
    request = read_request(written(tmp_path, SAMPLE))
    found = {name: (value.dtype.name, value.shape) for name, value in request.tensors.items()}
    assert found == {
        "input_ids": ("uint32", (2, 3)),
        "input_lengths": ("uint32", (2, 1)),
        "request_output_len": ("uint32", (2, 1)),
        "runtime_top_p": ("float32", (2, 1)),
        "random_seed": ("uint64", (2, 1)),
        "is_return_log_probs": ("bool", (2, 1)),
        "bad_words_list": ("int32", (1, 2, 2)),
    }
    assert int(request.tensors["random_seed"][1, 0]) == 2**64 - 1
    assert (request.protocol, request.url) == ("grpc", "localhost:8001")


@pytest.mark.parametrize("dtype", ["object", "bytes"])
def test_texts_become_utf8_bytes_in_nested_lists(tmp_path, dtype) -> None:
    file = {"request": [{"name": "INPUT_0", "data": [["blåbær"], ["x"]], "dtype": dtype}]}
    request = read_request(written(tmp_path, file))
    assert request.tensors["INPUT_0"].tolist() == [["blåbær".encode()], [b"x"]]
    assert (request.protocol, request.url, request.model_name) == (
        "http",
        "localhost:8000",
        "fastertransformer",
    )


def test_params_are_merged_over_the_file(tmp_path) -> None:
    params = {
        "config": {"url": "there:9001"},
        "request": [
            {"name": "request_output_len", "data": [[5], [6]]},
            {"name": "beam_width", "data": [[1]], "dtype": "uint32"},
        ],
    }
    request = read_request(written(tmp_path, SAMPLE), json.dumps(params))
    assert request.url == "there:9001" and request.protocol == "grpc"
    assert request.tensors["request_output_len"].tolist() == [[5], [6]]
    assert request.tensors["request_output_len"].dtype == np.uint32
    assert {"input_ids", "beam_width"} <= set(request.tensors)


def test_params_alone_are_a_request() -> None:
    assert read_request(None, json.dumps(SAMPLE)).tensors["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    "content, told",
    [
        ({"config": {}}, 'has no "request"'),
        ({"request": [{"name": "a", "data": [1]}]}, "tensor a has no dtype"),
        (
            {"request": [{"name": "a", "data": [[1], [2, 3]], "dtype": "uint32"}]},
            "tensor a: data does not fit",
        ),
        ({"request": [{"name": "a", "data": [1], "dtype": "uint33"}]}, "uint33"),
        ({**SAMPLE, "config": {"protocol": "smoke"}}, "protocol is 'smoke'; wanted http or grpc"),
        ({**SAMPLE, "config": {"protocol": "http", "stream_api": True}}, "stream_api needs.*grpc"),
        ([1], "holds a list"),
        ({**SAMPLE, "config": 3}, "config is 3; wanted an object"),
        ({**SAMPLE, "config": {"url": 8000}}, "config.url is 8000; wanted a text"),
        ({**SAMPLE, "config": {"url": "there:port"}}, "config.url is 'there:port'; wanted host:port"),
        (
            {**SAMPLE, "config": {"protocol": "grpc", "url": "http://there"}},
            "config.url is http://there; wanted host:port of the server's grpc",
        ),
        ({"request": {"name": "a"}}, "request is .*; wanted a list of tensors"),
        ({"request": [7]}, "request holds 7; wanted an object"),
        ({"request": [{"name": "a", "data": [["x"], ["y", "z"]], "dtype": "bytes"}]}, "different lengths"),
        ({"request": [{"name": "a", "data": [1], "dtype": "datetime64[s]"}]}, "Triton has no such type"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_reason(tmp_path, content, told) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=told) as caught:
        read_request(path)
    assert path in str(caught.value)


def test_no_json_and_no_file_are_told_apart(tmp_path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_request(tmp_path / "broken.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_request(tmp_path / "absent.json")


def test_a_file_nested_too_deeply_or_not_a_text_is_refused(tmp_path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="nested too deeply|not valid JSON"):
        read_request(tmp_path / "deep.json")
    (tmp_path / "latin.json").write_bytes(b'{"request": "\xe9"}')
    with pytest.raises(ConfigError, match="latin.json is not UTF-8"):
        read_request(tmp_path / "latin.json")
    with pytest.raises(ConfigError, match="not a file"):
        read_request(tmp_path)


@pytest.mark.parametrize("config", [{}, {"protocol": "grpc"}, {"protocol": "grpc", "stream_api": True}])
def test_a_server_that_is_down_is_named_in_one_line(config) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        request = read_request(None, json.dumps({**SAMPLE, "config": {**config, "url": url}}))
        with pytest.raises(EngineDownError, match=rf"answers at {url} over .*connection refused") as caught:
            list(send_request(request))
    assert "\n" not in str(caught.value)


def test_http_sent_to_the_port_of_grpc_is_told(capsys) -> None:
    with fake_server(FakeModel("fastertransformer", (), [ANSWER])) as server:
        request = read_request(None, json.dumps({**SAMPLE, "config": {"url": server.url}}))
        with pytest.raises(EngineDownError, match="not HTTP: is it the port of gRPC"):
            list(send_request(request))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("protocol", "told"), [("grpc", "is it the port of HTTP"), ("http", "an HTTP server that is not Triton")]
)
def test_a_foreign_http_server_is_told_from_triton(capsys, protocol, told) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(501, "not here")

        def log_message(self, *_arguments) -> None: ...

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        config = {"protocol": protocol, "url": f"127.0.0.1:{http.server_port}"}
        with pytest.raises(EngineDownError, match=told):
            list(send_request(read_request(None, json.dumps({**SAMPLE, "config": config}))))
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
    assert capsys.readouterr().out == ""  # tritonclient prints the page that it cannot parse


def test_every_output_comes_back_over_grpc(tmp_path) -> None:
    with fake_server(FakeModel("fastertransformer", (), [ANSWER], decoupled=False)) as server:
        request = read_request(written(tmp_path, SAMPLE), json.dumps({"config": {"url": server.url}}))
        (answer,) = send_request(request)
        got = server.requests[0]
    assert {name: value.tolist() for name, value in answer.outputs.items()} == {
        name: value.tolist() for name, value in ANSWER.items()
    }
    types = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in got.inputs}
    assert types["random_seed"] == ("UINT64", [2, 1]) and types["is_return_log_probs"] == ("BOOL", [2, 1])


def test_a_stream_gives_an_answer_a_message(tmp_path) -> None:
    steps = [
        {**ANSWER, "output_ids": ids, "sequence_length": np.array([[length]], np.uint32)}
        for ids, length in (
            (np.array([[[9, 8, 5, 0]]], np.uint32), 3),
            (np.array([[[9, 8, 5, 6]]], np.uint32), 4),
        )
    ]
    with fake_server(FakeModel("fastertransformer", (), steps, gap_s=0.05)) as server:
        over = {"config": {"url": server.url, "stream_api": True}}
        answers = list(send_request(read_request(written(tmp_path, SAMPLE), json.dumps(over))))
    console = Console(record=True, width=200)
    for answer in answers:
        show_streamed(answer, console)
    lines = console.export_text().splitlines()
    assert answers[1].elapsed_s - answers[0].elapsed_s > 0.04
    assert "probability 0.5" in lines[0] and "3 tokens [9, 8, 5]" in lines[0]
    assert "4 tokens [9, 8, 5, 6]" in lines[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_refusal_is_our_error(tmp_path, stream) -> None:
    model = FakeModel("fastertransformer", (), [ANSWER], error_after=0, error="input_ids has 9 tokens")
    with fake_server(model) as server:
        over = {"config": {"url": server.url, "stream_api": stream}}
        with pytest.raises(TridecodeError, match="fastertransformer at .*input_ids has 9 tokens"):
            list(send_request(read_request(written(tmp_path, SAMPLE), json.dumps(over))))


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_was_not_built_is_named_with_the_option_that_builds_it(tmp_path, stream) -> None:
    unknown = "Request for unknown model: 'tensorrt_llm' is not found"  # Triton's own words
    model = FakeModel("tensorrt_llm", (), [ANSWER], error_after=0, error=unknown)
    with fake_server(model) as server:
        over = {"config": {"url": server.url, "stream_api": stream, "model_name": "tensorrt_llm"}}
        with pytest.raises(
            TridecodeError, match="is not found; .*build-repo .*--contract tensorrt_llm_tokens"
        ):
            list(send_request(read_request(written(tmp_path, SAMPLE), json.dumps(over))))


def test_every_output_comes_back_over_http(tmp_path) -> None:
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            header = int(self.headers["Inference-Header-Content-Length"])
            bodies.append((self.path, json.loads(self.rfile.read(length)[:header])))
            data = {"name": "OUTPUT_0", "datatype": "BYTES", "shape": [1, 1], "data": ["fjord"]}
            body = json.dumps({"model_name": "ensemble", "outputs": [data]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments) -> None: ...

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        file = {
            "config": {"url": f"127.0.0.1:{http.server_port}", "model_name": "ensemble"},
            "request": [{"name": "INPUT_0", "data": [["hi"]], "dtype": "object"}],
        }
        (answer,) = send_request(read_request(written(tmp_path, file)))
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
    path, body = bodies[0]
    assert path == "/v2/models/ensemble/infer"
    assert body["inputs"][0]["datatype"] == "BYTES" and body["inputs"][0]["shape"] == [1, 1]
    console = Console(record=True, width=100)
    show(answer, console)
    shown = console.export_text()
    assert "OUTPUT_0 [1, 1] object" in shown and "fjord" in shown
