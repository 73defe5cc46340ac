"""Options of `tridecode serve`: refusals before anything starts, and the flags that tritonserver gets."""

from __future__ import annotations

import math
import os
import re
import socket

import pytest
from typer.testing import CliRunner

from tests.tools.serve.fakes import executable, repository
from tridecode.backend.base.errors import ConfigError
from tridecode.tools import cli
from tridecode.tools.serve import triton_access, tritonserver
from tridecode.tools.serve.command import _choose_logs
from tridecode.tools.serve.options import ServeOptions
from tridecode.tools.serve.ports import free_ports


def test_a_missing_or_empty_repository_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="none is not a directory; wanted a model repository"):
        ServeOptions(tmp_path / "none").check()
    with pytest.raises(ConfigError, match="has no model.*config.pbtxt"):
        ServeOptions(tmp_path).check()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("to y", "", "model folder 'to y'"),
        ("$(touch x)", "", r"model folder '\$\(touch x\)'"),
        ("toy", 'default_model_filename: "`touch x`"', "default_model_filename is '`touch x`'"),
        ("toy", 'instance_group { name: "a;b" }', "instance_group name is 'a;b'"),
        (
            "toy",
            'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/a b" } }',
            "EXECUTION_ENV_PATH is '/a b'",
        ),
    ],
)
def test_what_triton_would_hand_to_bash_is_refused_by_name(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said):
        ServeOptions(repository(tmp_path, name, text)).check()


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "²"])
def test_a_wrong_number_of_deaths_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=rf"--give-up-after is '{text}'; wanted never, or a number"):
        ServeOptions(repository(tmp_path), give_up_after=text).check()
    assert ServeOptions(tmp_path, give_up_after="never").max_deaths() == math.inf
    assert ServeOptions(tmp_path, give_up_after="12").max_deaths() == 12


def test_ports_are_checked_before_anything_starts(tmp_path):
    repository(tmp_path)
    http, grpc, metrics = free_ports(3)
    with pytest.raises(ConfigError, match=r"--http-port is 99999; wanted 1 to 65535"):
        ServeOptions(tmp_path, 99999, grpc, metrics).check()
    with pytest.raises(ConfigError, match=rf"--http-port and --grpc-port are both {http}"):
        ServeOptions(tmp_path, http, http, metrics).check()
    with socket.create_server(("127.0.0.1", metrics)):
        taken = rf"port {metrics} on 127\.0\.0\.1 is taken by process {os.getpid()} .*--metrics-port"
        with pytest.raises(ConfigError, match=taken):
            ServeOptions(tmp_path, http, grpc, metrics).check()
    with pytest.raises(ConfigError, match="192.0.2.1"):
        ServeOptions(tmp_path, http, grpc, metrics, address="192.0.2.1").check()


def test_ports_of_the_openai_service_are_checked_too(tmp_path):
    def engine(name: str, **parameters: object) -> None:
        lines = {"engine_model": name, **parameters}
        text = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
            for key, value in lines.items()
        )
        repository(tmp_path, name, text)

    http, grpc, metrics, openai = free_ports(4)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    engine("one", openai_port=http)
    with pytest.raises(
        ConfigError, match=rf"--http-port and openai_port of one/config.pbtxt are both {http}"
    ):
        ServeOptions(tmp_path, **ports).check()
    ServeOptions(tmp_path, openai_port=openai, **ports).check()  # takes precedence
    engine("one", openai_port=openai)
    with socket.create_server(("127.0.0.1", openai)):
        with pytest.raises(ConfigError, match=rf"port {openai} .* with openai_port of one/config.pbtxt"):
            ServeOptions(tmp_path, **ports).check()
    engine("two", openai_port=openai)
    with pytest.raises(ConfigError, match=rf"openai_port of (one|two)/config.pbtxt are both {openai}"):
        ServeOptions(tmp_path, **ports).check()
    with pytest.raises(ConfigError, match=r"engines of several models \(one, two\).*config.pbtxt of one"):
        ServeOptions(tmp_path, openai_port=openai, **ports).check()
    engine("two", openai_port="auto")
    assert ServeOptions(tmp_path, **ports).check() == ["one", "two"]


@pytest.mark.parametrize(
    "flag",
    [
        "--backend-config=python,shm-region-prefix-name=x",
        "--load-model=toy",
        "--http-port=1",
        "--model-control-mode=none",
        "--http-address=0.0.0.0",
    ],
)
def test_flags_of_triton_that_are_serve_s_own_are_refused(tmp_path, flag):
    with pytest.raises(ConfigError, match=flag.rpartition("=")[0].rpartition(",")[2]):
        ServeOptions(repository(tmp_path), triton_args=(flag,)).check()


def test_one_more_port_with_a_control_api_is_warned_of(tmp_path, caplog):
    options = ServeOptions(repository(tmp_path), *free_ports(3), triton_args=("--allow-sagemaker=true",))
    options.check()
    assert "--allow-sagemaker opens one more HTTP port" in caplog.text


def test_everything_is_on_loopback_and_closed_by_default(tmp_path):
    arguments = ServeOptions(tmp_path, key="k" * 16).server_arguments()
    for name in ("http", "grpc", "metrics"):
        assert f"--{name}-address=127.0.0.1" in arguments
    closed = f"model-repository,shared-memory,trace,logging:tridecode-control={'k' * 16}"
    assert f"--http-restricted-api={closed}" in arguments
    assert f"--grpc-restricted-protocol={closed}" in arguments
    opened = ServeOptions(tmp_path, address="0.0.0.0", metrics_address="127.0.0.1").server_arguments()
    assert {"--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=127.0.0.1"} < set(opened)


def test_an_api_that_the_user_restricts_keeps_the_user_s_key(tmp_path):
    given = ("--http-restricted-api=health,trace:a=b",)
    arguments = ServeOptions(tmp_path, triton_args=given).server_arguments()
    ours = triton_access.values_of(arguments, "http-restricted-api")[0]
    assert ours.startswith("model-repository,shared-memory,logging:")


def test_a_key_is_random_or_given_and_leaves_the_environment(monkeypatch):
    assert triton_access.control_key() != triton_access.control_key()
    monkeypatch.setenv("TRIDECODE_CONTROL_KEY", "0123456789abcdef")
    assert triton_access.control_key() == "0123456789abcdef"
    assert "TRIDECODE_CONTROL_KEY" not in os.environ
    monkeypatch.setenv("TRIDECODE_CONTROL_KEY", "a:b=c,")
    with pytest.raises(ConfigError, match="TRIDECODE_CONTROL_KEY holds 6 characters"):
        triton_access.control_key()


def test_the_drop_in_closes_what_its_command_line_leaves_open():
    arguments = tritonserver.with_defaults(["--model-repository", "m", "--http-address=0.0.0.0"], "k" * 16)
    assert "--grpc-address=127.0.0.1" in arguments and "--http-address=127.0.0.1" not in arguments
    assert len(triton_access.values_of(arguments, "http-restricted-api")) == 1
    assert arguments[-3:] == ["--model-repository", "m", "--http-address=0.0.0.0"]


@pytest.mark.parametrize(
    "flags", [["serve", "NONE"], ["tritonserver", "--model-repository", "NONE", "--id=x"]]
)
def test_the_command_line_says_a_wrong_setting_in_one_line_and_ends_with_2(tmp_path, flags):
    arguments = [flag.replace("NONE", str(tmp_path / "none")) for flag in flags]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and re.search(
        "none( is not a directory|: no such file or folder)", line
    )


@pytest.mark.parametrize("value", ["never", "-1", "nan"])
def test_a_wrong_orphan_rule_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="--orphans is"):
        ServeOptions(repository(tmp_path), orphans=value).check()


def test_arguments_of_triton_come_after_ours(tmp_path):
    options = ServeOptions(tmp_path, drain_s=7.4, triton_args=("--log-verbose=1",))
    arguments = options.server_arguments()
    assert arguments[0] == f"--model-repository={tmp_path}"
    assert arguments[-1] == "--log-verbose=1"
    assert "--exit-timeout-secs=7" in arguments
    assert "--model-control-mode=explicit" in arguments, "without it a dead door cannot be reloaded"


@pytest.mark.parametrize("gpu", [False, True])
def test_gpu_metrics_are_left_out_where_there_is_no_gpu(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("PATH", str(tmp_path))
    if gpu:
        executable(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    assert ("--allow-gpu-metrics=false" in ServeOptions(tmp_path).server_arguments()) != gpu


def test_the_log_s_format_reaches_every_process_by_the_environment(monkeypatch):
    for name in ("TRIDECODE_LOG_FORMAT", "TRIDECODE_REQUEST_LOG"):
        monkeypatch.setenv(name, "")
    _choose_logs(None, None)
    assert (os.environ["TRIDECODE_LOG_FORMAT"], os.environ["TRIDECODE_REQUEST_LOG"]) == ("", "")
    _choose_logs("json", False)
    assert (os.environ["TRIDECODE_LOG_FORMAT"], os.environ["TRIDECODE_REQUEST_LOG"]) == ("json", "off")
    with pytest.raises(ConfigError, match="--log-format is 'xml'; wanted text or json"):
        _choose_logs("xml", None)
