"""Calls of Triton's HTTP interface: the key, and the server's text in errors."""

from __future__ import annotations

import pytest

from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError


def test_the_key_goes_with_calls_of_the_repository(triton):
    TritonHttp(f"127.0.0.1:{triton.server.server_port}", "secret").load("toy")
    triton.http.index()
    assert triton.keys == ["secret", None]


def test_the_server_s_text_is_part_of_an_error(triton):
    triton.failing_loads = 1
    with pytest.raises(TritonHttpError, match="400 failed to load toy"):
        triton.http.load("toy")
    with pytest.raises(TritonHttpError, match="refused"):
        TritonHttp(f"127.0.0.1:{free_ports(1)[0]}").index()
