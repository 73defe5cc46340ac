"""Nodes find node 0, and only nodes with the secret reach it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.nodes import addresses, link
from tridecode.backend.nodes import rendezvous as meeting
from tridecode.backend.nodes.identity import difference
from tridecode.backend.nodes.launchers import NodePlace
from tridecode.backend.nodes.mpi_exchange import Prober, choose_address, is_node_0
from tridecode.backend.nodes.rendezvous import Meeting
from tridecode.backend.supervisor import processes
from tridecode.tools.serve.ports import free_ports

OURS = processes.identify(os.getpid())


def test_the_environment_s_meeting_and_its_errors(tmp_path: Path):
    secret = tmp_path / "secret"
    place = NodePlace(1, 2, "TRIDECODE_NODES", ("gpu-1", "gpu-2"), 7117, str(secret))
    with pytest.raises(ConfigError, match="TRIDECODE_NODES_SECRET_FILE names .* which cannot be read"):
        meeting.find(place, OURS, tmp_path)
    secret.write_text("short\n")
    with pytest.raises(ConfigError, match="holds 5 characters; wanted 16 or more"):
        meeting.find(place, OURS, tmp_path)
    secret.write_text("0123456789abcdef\n")
    assert meeting.find(place, OURS, tmp_path) == Meeting("gpu-1", 7117, "0123456789abcdef", place.hosts)


def test_mpi_is_asked_once_and_the_record_is_private(tmp_path: Path, monkeypatch):
    helper = tmp_path / "helper"
    told = Meeting("10.0.0.1", 7117, "s" * 64, ("a", "b"))
    helper.write_text(
        f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho '{msgspec.json.encode(told).decode()}'\n"
    )
    helper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(helper))
    place = NodePlace(0, 2, "mpirun")
    assert meeting.find(place, OURS, tmp_path) == meeting.find(place, OURS, tmp_path) == told
    assert (tmp_path / "asked").read_text() == "asked\n"
    (record,) = tmp_path.glob("nodes-*/meeting.json")
    shutil.rmtree(record.parent)
    assert meeting.keep(told, OURS, tmp_path) and not meeting.keep(told, OURS, tmp_path)
    assert meeting.find(place, OURS, tmp_path) == told
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    meeting.clean(OURS, tmp_path)
    assert not record.parent.exists()


def test_a_launcher_of_another_mpi_is_named(tmp_path: Path):
    """MPI sees a process that was not started by mpirun as alone, with any environment."""
    place = NodePlace(1, 2, "srun")
    with pytest.raises(ConfigError) as caught:
        meeting.find(place, OURS, tmp_path)
    wanted = (
        r"node 1 of 2 \(srun\): the exchange over MPI ended with exit code 1: .*says node 1 of 2, and MPI"
    )
    assert re.search(wanted, str(caught.value), re.DOTALL), caught.value


def test_an_address_counts_only_if_node_0_itself_answers_there():
    prober = Prober("secret")
    assert is_node_0("127.0.0.1", prober.port, "secret")
    assert not is_node_0("127.0.0.1", prober.port, "another")
    prober.close()
    assert not is_node_0("127.0.0.1", free_ports(1)[0], "secret")


def test_the_first_address_that_all_reach_is_chosen():
    offered, hosts = ["172.17.0.1", "10.0.0.1", "10.1.0.1"], ["a", "b", "c"]
    assert choose_address(offered, [offered, offered[1:], offered[1:]], hosts) == "10.0.0.1"
    with pytest.raises(ValueError, match=r"node 2 \(c\) reaches node 0 \(a\) at none of its addresses"):
        choose_address(offered, [offered, offered, []], hosts)
    with pytest.raises(ValueError, match="is reached by all nodes; wanted TRIDECODE_NODE_ADDRESS"):
        choose_address(offered, [offered, offered[:1], offered[1:]], hosts)


@pytest.mark.parametrize("secret, heard", [("the right one", True), ("a wrong one", False)])
def test_only_the_secret_opens_the_link(secret, heard):
    context = zmq.Context()
    (port,) = free_ports(1)
    server = link.listen(context, "127.0.0.1", port, "the right one")
    client = link.connect(context, "127.0.0.1", port, secret)
    try:
        if client.poll(2000 if heard else 700, zmq.POLLOUT):
            client.send(b"hello")
        assert bool(server.poll(2000 if heard else 300)) == heard
    finally:
        client.close(0)
        server.close(0)
        context.term()


def test_a_client_without_encryption_is_not_heard():
    context = zmq.Context()
    (port,) = free_ports(1)
    server = link.listen(context, "127.0.0.1", port, "secret")
    plain = context.socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{port}")
    plain.send(b"hello")
    assert not server.poll(500)
    plain.close(0)
    server.close(0)
    context.term()


def test_bytes_that_are_no_handshake_harm_nobody():
    context = zmq.Context()
    (port,) = free_ports(1)
    server = link.listen(context, "127.0.0.1", port, "secret")
    for seed in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(Random(seed).randbytes(1 << seed % 12))
    client = link.connect(context, "127.0.0.1", port, "secret")
    assert client.poll(2000, zmq.POLLOUT)
    client.send(b"hello")
    assert server.poll(2000) and server.recv_multipart()[1] == b"hello"
    client.close(0)
    server.close(0)
    context.term()


def test_node_0_finds_the_address_that_its_name_means(monkeypatch):
    route = addresses.candidates()[0]
    assert addresses.own_address("127.0.0.1") == ("127.0.0.1", True)
    assert addresses.own_address(route) == (route, True)
    names = {"debian": "127.0.1.1", "service": "192.0.2.7"}
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real(names.get(host, host), *a, **k))
    assert addresses.own_address("debian") == addresses.own_address("service") == (route, False)


def test_the_interface_of_the_route_is_the_kernel_s():
    assert addresses.interface_towards("127.0.0.1") == "lo"
    route = subprocess.run(
        ["ip", "-o", "route", "get", "192.0.2.1"], capture_output=True, text=True, check=False
    )
    if " dev " in route.stdout:
        assert addresses.interface_towards("192.0.2.1") == route.stdout.split(" dev ")[1].split()[0]
        assert addresses.candidates()[0] == route.stdout.split(" src ")[1].split()[0]


def test_another_repository_is_named():
    ours = {"config.pbtxt": "ab", "config.ini": "cd"}
    assert difference(dict(ours), ours) == ""
    assert difference({**ours, "config.ini": "ef"}, ours) == "config.ini is ef there and cd on node 0"
    assert "None there" in difference({"config.pbtxt": "ab"}, ours)
