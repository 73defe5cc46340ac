"""--triton-tls before the real tritonserver, which wants a certificate of its clients, too."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, repository
from tests.backend.front.transports import triton_before
from tests.fake_engine import FakeEngine, FakeSupervisor, scripted
from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.__main__ import FrontArguments, read_settings
from tridecode.tools.serve.ports import free_ports


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and a certificate of the first one for the server and for a client."""
    folder = tmp_path_factory.mktemp("keys")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        openssl(folder, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name in ("server", "client"):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1")
        paths = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(folder, *new, "-subj", f"/CN={name}", *signed, *paths)
    return folder


@pytest.fixture(scope="module")
def address(
    keys: Path, ids: Callable[[str], list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The gRPC port of a server with TLS."""
    options = ["--grpc-use-ssl-mutual=true", f"--grpc-server-cert={keys / 'server.pem'}"]
    options += [f"--grpc-server-key={keys / 'server.key'}", f"--grpc-root-cert={keys / 'ca.pem'}"]
    with FakeEngine(next_token=scripted(ids(TEXT))) as engine, FakeSupervisor(engine) as supervisor:
        root = tmp_path_factory.mktemp("server")
        with triton_before(root, engine, supervisor, free_ports(3), options) as server:
            yield server.grpc


@pytest.mark.server
def test_a_server_with_certificates_answers(
    address: str, keys: Path, toy_repository: Path, tmp_path: Path, ids: Callable[[str], list[int]]
) -> None:
    files = ("--triton-ca", str(keys / "ca.pem"), "--triton-cert", str(keys / "client.pem"))
    options = ("--triton", address, "--triton-tls", *files, "--triton-key", str(keys / "client.key"))
    with Front(toy_repository, tmp_path / "log", *options) as front:
        body = {"prompt": "When?", "max_tokens": len(ids(TEXT))}
        assert front.post("/v1/completions", body).json()["choices"][0]["text"] == TEXT


@pytest.mark.server
@pytest.mark.parametrize("lacking", ["tls", "client", "authority"])
def test_a_connection_without_trust_is_not_used(
    address: str, keys: Path, toy_repository: Path, tmp_path: Path, lacking: str
) -> None:
    client = ("--triton-cert", str(keys / "client.pem"), "--triton-key", str(keys / "client.key"))
    options = {
        "tls": (),
        "client": ("--triton-tls", "--triton-ca", str(keys / "ca.pem")),
        "authority": ("--triton-tls", "--triton-ca", str(keys / "other.pem"), *client),
    }[lacking]
    with Front(toy_repository, tmp_path / "log", "--triton", address, *options, ready=False) as front:
        wait_until(lambda: f"down: {address}" in front.text(), 60, "a probe that fails")
        assert front.http.get("/health").status_code == 503


def test_options_that_cannot_be_used_are_refused(keys: Path, tmp_path: Path) -> None:
    repo, host = repository(tmp_path / "repo"), "gpu1:8001"
    (tmp_path / "text").write_text("a diary")
    ca, cert, key = (str(keys / name) for name in ("ca.pem", "client.pem", "client.key"))
    for named, text in (
        ({"triton_tls": True}, "--triton-tls without --triton; wanted both"),
        ({"triton": host, "triton_ca": ca}, "--triton-ca without --triton-tls"),
        ({"triton": host, "triton_tls": True, "triton_cert": cert}, "--triton-cert without --triton-key"),
        ({"triton": host, "triton_tls": True, "triton_key": key}, "--triton-key without --triton-cert"),
        ({"triton": host, "triton_tls": True, "triton_ca": "/absent"}, "cannot be read: No such file"),
        ({"triton": host, "triton_tls": True, "triton_ca": str(tmp_path / "text")}, "certificates in PEM"),
        ({"triton": host, "triton_tls": True, "triton_cert": ca, "triton_key": key}, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_settings(FrontArguments(repo, **named))  # type: ignore[arg-type]
    named = {"triton_tls": True, "triton_ca": ca, "triton_cert": cert, "triton_key": key}
    settings = read_settings(FrontArguments(repo, triton=host, **named))  # type: ignore[arg-type]
    assert settings.triton_tls and settings.triton_key == key
