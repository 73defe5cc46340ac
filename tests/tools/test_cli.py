"""The `tridecode` command line: what it offers, how fast it says so, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama
from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.tools import serve
from tridecode.tools.cli import app
from tridecode.tools.running_server import running_server

COMMANDS = ("build-repo", "serve", "generate", "send-request", "check", "demo", "bench")
BENCHES = ("engine", "server", "compare", "load", "loading", "agree")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command_in_a_line() -> None:
    done = run("--help")
    assert done.exit_code == 0
    lines = [line for line in done.output.split("Commands:")[1].splitlines() if line.startswith("  ")]
    assert set(COMMANDS) <= {line.split()[0] for line in lines}
    assert not any(line.endswith("...") for line in lines)  # no summary is cut


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)])
def test_a_commands_help_explains_every_option_and_gives_an_example(command) -> None:
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert command == ["bench"] or "Example:\n    tridecode " in done.output
    group = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    assert [option.name for option in group.params if not option.help] == []


def test_help_comes_at_once_and_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import tridecode.tools.cli as c; c.app(['--help'])"]
    subprocess.run(command, capture_output=True)  # writes the byte code
    times = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        times.append(time.monotonic() - started)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "numpy", "tritonclient", "grpc", "matplotlib", "rich"}
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["build-repo", "--model", "/absent", "--output", "x"], "/absent"),
        (["build-repo", "--model", "m", "--output", "x", "--set", "max_sequences"], "wanted KEY=VALUE"),
        (["serve", "/absent"], "/absent is no directory"),
        (["send-request", "/absent.json"], "/absent.json cannot be read"),
        (["send-request"], 'has no "request"'),
        (["bench", "engine", "--preset", "gpt5"], "no preset 'gpt5'"),
        (["bench", "engine", "--batches", "1,many"], "'1,many' is no list"),
        (["bench", "engine", "--preset", "gpt2", "--prompt-tokens", "1000"], "gpt2 has 1024 positions"),
        (["bench", "load", "--url", "localhost:1", "--model", "m"], "--tokenizer"),
    ],
)
def test_an_error_of_ours_is_one_line_and_exit_code_1(arguments, told, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run(*arguments)
    assert done.exit_code == 1
    lines = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and told in lines[0]
    assert "Traceback" not in done.output


def test_generate_streams_to_stdout_and_its_figures_to_stderr() -> None:
    model = FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([("Hi", 1), (" there", 1)]))
    with fake_server(model) as server:
        options = ["--top-k", "5", "--stop", "a", "--stop", "b"]
        done = run("generate", "--url", server.url, "--prompt", "x", *options)
        request = server.requests[0]
    assert done.exit_code == 0
    assert done.stdout == "Hi there\n"
    assert "first token" in done.stderr and "tokens/s" in done.stderr
    names = [tensor.name for tensor in request.inputs]
    assert {"top_k", "stop_words"} <= set(names) and "temperature" not in names
    assert list(request.inputs[names.index("stop_words")].shape) == [1, 2]


def test_generate_reads_a_prompt_from_stdin() -> None:
    model = FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([("ok", 1)]))
    with fake_server(model) as server:
        arguments = ["generate", "--url", server.url, "--prompt", "-", "--no-stream"]
        done = CliRunner().invoke(app, arguments, input="from a pipe")
        request = server.requests[0]
    assert done.stdout == "ok\n"
    assert request.raw_input_contents[0][4:] == b"from a pipe"


def test_generate_fails_with_the_servers_text() -> None:
    model = FakeModel(
        "tensorrt_llm_bls", ("text_input",), text_responses([]), error_after=0, error="too long"
    )
    with fake_server(model) as server:
        done = run("generate", "--url", server.url, "--prompt", "x")
    assert done.exit_code == 1 and "error: too long" in done.output


def test_flags_after_two_dashes_go_to_tritonserver(monkeypatch, tmp_path) -> None:
    given = {}
    monkeypatch.setattr(serve, "serve", lambda *args, **options: given.update(options, path=args[0]) or 3)
    done = run(
        "serve", str(tmp_path), "--grpc-port", "9001", "--", "--log-verbose=1", "--model-load-thread-count=2"
    )
    assert done.exit_code == 3
    assert given["path"] == tmp_path and given["grpc_port"] == 9001 and given["http_port"] == 8000
    assert given["triton_args"] == ["--log-verbose=1", "--model-load-thread-count=2"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Built by the command line from a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("cli")
    checkpoint = save(tiny_llama(), folder / "checkpoint")
    arguments = [
        "--model",
        str(checkpoint),
        "--output",
        str(folder / "models"),
        "--dtype",
        "fp32",
        "--no-parity",
    ]
    done = run(
        "build-repo", *arguments, "--set", "max_sequences=4", "--set", "device=cpu", "--unbatched-text"
    )
    assert done.exit_code == 0, done.output
    return folder / "models"


def test_build_repo_writes_what_it_was_told(repository) -> None:
    config = (repository / "fastertransformer" / "config.pbtxt").read_text()
    assert 'key: "max_sequences" value: { string_value: "4" }' in config
    assert 'key: "data_type" value: { string_value: "fp32" }' in config
    assert (repository / "tensorrt_llm_bls_unbatched" / "config.pbtxt").is_file()


def test_check_tells_errors_from_warnings(repository, tmp_path) -> None:
    done = run("check", str(repository), "--checksums")
    assert done.exit_code == 0 and "errors: 0, warnings: 1" in done.output
    assert "PARITY.json" in done.output  # it was built without
    copy = shutil.copytree(repository, tmp_path / "broken")
    victim = next((copy / "fastertransformer" / "1").rglob("*dense.weight.0.bin"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    done = run("check", str(copy), "--checksums")
    assert done.exit_code == 1 and victim.name in done.output


@pytest.mark.server
def test_the_commands_work_against_a_real_server(repository, tmp_path) -> None:
    with running_server(repository) as server:
        text = run("generate", "--url", server.grpc_url, "--prompt", "The history of", "--max-tokens", "6")
        whole = run("generate", "--url", server.grpc_url, "-p", "The history of", "-n", "6", "--no-stream")
        tokens = {}
        for protocol, url, model in (
            ("http", server.http_url, "fastertransformer"),
            ("grpc", server.grpc_url, "fastertransformer_streaming"),
        ):
            request = {
                "config": {"protocol": protocol, "url": url, "model_name": model},
                "request": [
                    {"name": "input_ids", "data": [[7, 9, 11]], "dtype": "uint32"},
                    {"name": "input_lengths", "data": [[3]], "dtype": "uint32"},
                    {"name": "request_output_len", "data": [[4]], "dtype": "uint32"},
                ],
            }
            request["config"]["stream_api"] = model.endswith("streaming")
            (tmp_path / "request.json").write_text(json.dumps(request))
            tokens[protocol] = run("send-request", str(tmp_path / "request.json"))
        load = ["--url", server.grpc_url, "--tokenizer", str(repository), "--output", str(tmp_path)]
        load += ["--prompt-tokens", "8", "--output-tokens", "4", "--concurrency", "3"]
        bench = run("bench", "load", *load)
    assert text.exit_code == whole.exit_code == 0, text.output + whole.output
    assert text.stdout == whole.stdout and len(text.stdout) > 1
    assert "6 tokens" in text.stderr
    assert tokens["http"].exit_code == tokens["grpc"].exit_code == 0, tokens["http"].output
    streamed = tokens["grpc"].stdout.splitlines()
    assert [line.split(" tokens ")[0].split()[-1] for line in streamed] == ["4", "5", "6", "7"]
    last = re.findall(r"\d+", streamed[-1].split(" tokens ")[1])
    whole_ids = tokens["http"].stdout.split("output_ids")[1].split("\n")[1]
    assert re.findall(r"\d+", whole_ids) == last
    assert bench.exit_code == 0, bench.output
    report = json.loads((tmp_path / "load.json").read_text())["results"]["3 at a time"]
    assert report["output_tokens"] == 48 and report["tokens_counted"]
