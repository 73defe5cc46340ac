"""The `tridecode` command line: what it offers, how fast it says so, and how it fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama, tiny_tokenizer
from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.checks import repository as check_repo
from tridecode.tools.cli import app
from tridecode.tools.serve import serving
from tridecode.tools.serve.server_process import running_server

COMMANDS = (
    *("build-repo", "serve", "batch", "generate", "send-request", "check", "doctor", "demo", "bench"),
    "evaluate-lambada",
    "evaluate-prompts",
    "train-draft",
)
ADAPTERS = ("list", "add", "remove")
BENCHES = ("engine", "server", "compare", "load", "loading", "agree")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command_in_a_line() -> None:
    done = run("--help")
    assert done.exit_code == 0
    lines = [line for line in done.output.split("Commands:")[1].splitlines() if line.startswith("  ")]
    assert set(COMMANDS) <= {line.split()[0] for line in lines}
    assert not any(line.endswith("...") for line in lines)  # no summary is cut


@pytest.mark.parametrize(
    "command",
    [
        *([name] for name in COMMANDS),
        *(["bench", name] for name in BENCHES),
        *(["adapters", name] for name in ADAPTERS),
    ],
)
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
        before = os.times()  # seconds of a processor, which other processes do not lengthen
        done = subprocess.run(command, capture_output=True, text=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "numpy", "tritonclient", "grpc", "matplotlib", "rich"}
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["build-repo", "--model", "/absent", "--output", "x"], "/absent"),
        (["build-repo", "--model", "m", "--output", "x", "--set", "max_sequences"], "wanted KEY=VALUE"),
        (["serve", "/absent"], "/absent: no such file or folder"),
        (["send-request", "/absent.json"], "/absent.json cannot be read"),
        (["send-request"], 'has no "request"'),
        (["bench", "engine", "--preset", "gpt5"], "no preset 'gpt5'"),
        (["bench", "engine", "--batches", "1,many"], "'1,many' is not a list"),
        (["bench", "engine", "--preset", "gpt2", "--prompt-tokens", "1000"], "gpt2 has 1024 positions"),
        (
            ["bench", "load", "--url", "localhost:1", "--model", "m"],
            "no Triton server answers at localhost:1",
        ),
        (["bench", "load", "--url", "localhost:1", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["bench", "load", "--url", "localhost:1", "--output", "file"], "file is not a folder"),
        (["bench", "engine", "--preset", "toy", "--output", "file/x"], "file is not a folder"),
        (["build-repo", "--model", "foreign.gguf", "--output", "x"], "foreign.gguf is not a readable GGUF"),
        (["build-repo", "--model", "short.gguf", "--output", "x"], "short.gguf is not a readable GGUF"),
        (["build-repo", "--model", "short.gguf", "--output", "file/x"], "file is not a folder"),
        (["build-repo", "--model", "short.gguf", "--output", "file"], "file is not a folder"),
        (["demo", "--cache", "file/x"], "file is not a folder"),
        (["send-request", "file"], "file is not valid JSON"),
        (["send-request", "--params", '{"config": 3}'], "config is 3; wanted an object"),
        (["send-request", "--params", "\udcff"], "--params is not UTF-8"),
        (["generate", "-p", "a\udcff", "-u", "localhost:1"], "--prompt is not UTF-8: byte 1 is 0xff"),
        (["generate", "-p", "x", "--stop", "\udcff", "-u", "localhost:1"], "--stop is not UTF-8"),
        (["generate", "-p", "x", "-u", "http://localhost:8000"], "is an HTTP address; wanted host:port"),
        (["generate", "-p", "x", "-u", "localhost:1"], "no Triton server answers at localhost:1"),
        (["generate", "-p", "x", "-u", "localhost:1", "--chat"], "name a repository or tokenizer folder"),
        (["generate", "-p", "x", "-u", "localhost:1", "--tokenizer", "."], "--tokenizer is for --chat"),
        (
            ["generate", "-p", "x", "-u", "localhost:1", "--chat-template", "x"],
            "--chat-template is for --chat",
        ),
    ],
)
def test_an_expected_mistake_is_one_line_on_stderr_and_exit_code_2(
    arguments, told, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "foreign.gguf").write_bytes(b"PK" * 50)
    (tmp_path / "short.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\x01" * 9)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and told in lines[0]
    assert "Traceback" not in done.output
    assert sorted(os.listdir(tmp_path)) == ["file", "foreign.gguf", "short.gguf"]


def test_usage_errors_and_a_defect_of_ours_have_other_codes(monkeypatch, tmp_path) -> None:
    assert run("check").exit_code == 2  # Typer's own

    def defect(*_args, **_options):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(check_repo, "check_repo", defect)
    done = run("check", str(tmp_path))
    assert done.exit_code == 1 and isinstance(done.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/models/x.bin"),
            2,
            "/models/x.bin: No space left",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/models"), 2, "/models: Permission denied"),
        (TridecodeError("the cause\na line of its log"), 2, "a line of its log\nerror: the cause\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
)
def test_faults_of_the_surroundings_are_lines_and_not_tracebacks(monkeypatch, tmp_path, raised, code, told):
    def fail(*_args, **_options):
        raise raised

    monkeypatch.setattr(check_repo, "check_repo", fail)
    done = run("check", str(tmp_path))
    assert done.exit_code == code and told in done.stderr
    assert bool(told) == bool(done.stderr)


def test_a_reader_that_leaves_ends_a_command_silently(tmp_path) -> None:
    for arguments in (["check", str(tmp_path)], ["--help"]):
        command = [sys.executable, "-m", "tridecode.tools.cli", *arguments]
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_while_stdin_is_read_ends_without_a_word() -> None:
    # a shell's background job, which the tests may be, ignores SIGINT and hands that on
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = "import tridecode.tools.client.generate\nimport tridecode.tools.cli as c\n"
    code += "print('up', flush=True); c.main()"
    command = [sys.executable, "-c", heed + code, "generate", "-p", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"up\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b""


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"tridecode {metadata.version('tridecode')}\n"


def test_text_of_another_encoding_than_the_terminals_is_no_fault() -> None:
    model = FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([("größer", 1)]))
    with fake_server(model) as server:
        command = [sys.executable, "-m", "tridecode.tools.cli", "generate", "-p", "x", "-u", server.url]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"gr??er\n")


def test_generate_streams_to_stdout_and_its_figures_to_stderr() -> None:
    responses = text_responses([("Hi", 1), (" there", 1)])
    model = FakeModel("tensorrt_llm_bls", ("text_input",), responses, gap_s=0.1)
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


@pytest.mark.parametrize(("typed", "sent"), [("x\n", b"x"), ("x\n\n", b"x\n"), ("x", b"x"), ("x \n", b"x ")])
def test_one_trailing_newline_of_stdin_is_dropped(typed, sent) -> None:
    model = FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([("ok", 1)]))
    with fake_server(model) as server:
        CliRunner().invoke(app, ["generate", "--url", server.url, "-p", "-"], input=typed)
        assert server.requests[0].raw_input_contents[0][4:] == sent


def test_stdin_that_is_not_utf8_is_one_line() -> None:
    done = CliRunner().invoke(app, ["generate", "-u", "localhost:1", "-p", "-"], input=b"a\xffb")
    assert done.exit_code == 2 and done.stderr.startswith("error: stdin is not UTF-8: byte 1 is 0xff")


def test_a_temperature_alone_samples_with_a_seed_that_is_told() -> None:
    model = FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([("ok", 1)]))
    with fake_server(model) as server:
        done = run("generate", "--url", server.url, "-p", "x", "--temperature", "0.7")
        request = server.requests[0]
        greedy = run("generate", "--url", server.url, "-p", "x")
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents))
    seed = int.from_bytes(sent["seed"], "little")
    assert f"seed {seed}\n" in done.stderr and done.stdout == "ok\n"
    assert struct.unpack("<f", sent["top_p"]) == (1.0,)
    assert "seed" not in greedy.stderr


def test_chat_puts_the_prompt_into_the_template(tmp_path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<user>{{ messages[0].content }}<assistant>")
    for inputs in (("text_input",), ("text_input", "add_special_tokens")):
        dtypes = {"text_input": "STRING", "add_special_tokens": "BOOL"}
        model = FakeModel("tensorrt_llm_bls", inputs, text_responses([("ok", 1)]), dtypes=dtypes)
        with fake_server(model) as server:
            done = run("generate", "-u", server.url, "-p", "hi", "--chat", "--tokenizer", str(tmp_path))
            (request,) = server.requests
        sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents))
        assert sent["text_input"][4:] == b"<user>hi<assistant>"
        assert sent.get("add_special_tokens") == (b"\0" if len(inputs) == 2 else None)
        assert done.exit_code == 0, done.output


def test_generate_fails_with_the_servers_text() -> None:
    model = FakeModel(
        "tensorrt_llm_bls", ("text_input",), text_responses([]), error_after=0, error="too long"
    )
    with fake_server(model) as server:
        done = run("generate", "--url", server.url, "--prompt", "x")
    assert done.exit_code == 2 and "error: too long" in done.output


def test_flags_after_two_dashes_go_to_tritonserver(monkeypatch, tmp_path) -> None:
    given = []
    monkeypatch.setattr(serving, "serve", lambda options: given.append(options) or 3)
    done = run(
        "serve", str(tmp_path), "--grpc-port", "9001", "--", "--log-verbose=1", "--model-load-thread-count=2"
    )
    assert done.exit_code == 3
    (options,) = given
    assert (options.repository, options.grpc_port, options.http_port) == (tmp_path, 9001, 8000)
    assert options.triton_args == ("--log-verbose=1", "--model-load-thread-count=2")


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
