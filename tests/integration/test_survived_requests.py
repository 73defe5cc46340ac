"""Requests that a tritonserver under `tridecode serve` refuses or survives: nothing is started again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.integration.supervised import SHM, Service, post, services
from tests.waiting import wait_until
from tridecode.tools.serve import triton_access
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service for all tests of this file, which kill and change nothing."""
    with services() as start:
        yield start()


BODIES = {
    "4 MB of text": b'{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["'
    + b"x" * 4_000_000
    + b'"]}]}',
    "deep JSON": b'{"inputs":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
}


def test_large_and_deep_bodies_do_not_end_the_server(service):
    """Each of them crashes Triton 2.51 with SIGSEGV if its stacks have the usual 8 MiB."""
    triton = service.triton
    for body in BODIES.values():
        assert "Error: " not in post(service, "echo", body)
    assert service.answers() and service.triton == triton


def test_a_shape_whose_product_wraps_is_refused_and_harms_nobody(service):
    """Triton 2.51 takes [4, 2^62] and 0 bytes for consistent: without the door's care its process aborts."""
    door, streams = service.door("fastertransformer"), [service.streaming() for _ in range(4)]
    for shape in ([4, 2**62], [1024, 2**54]):
        error = service.request(shape=shape).wait_error()
        assert f"input_ids has shape {shape}; this is more than any memory holds" in error
    assert service.answers()
    assert service.door("fastertransformer") == door
    assert not any(stream.done.is_set() for stream in streams)


CLOSED = ["/v2/repository/index", "/v2/repository/models/echo/unload", "/v2/repository/models/x/load"]
CLOSED += ["/v2/systemsharedmemory/region/r/register", "/v2/systemsharedmemory/unregister"]
CLOSED += ["/v2/cudasharedmemory/region/r/register", "/v2/logging", "/v2/trace/setting"]
CLOSED += ["/v2/models/echo/trace/setting"]


def test_who_may_call_what(service):
    for path in CLOSED:
        with pytest.raises(TritonHttpError, match="403 This API is restricted"):
            TritonHttp(service.server.http_url)._post(path, 5.0)
    assert {row.state for row in service.server.http.index()} == {"READY"}
    with grpcclient.InferenceServerClient(service.server.grpc_url) as client:
        for call in (
            client.get_model_repository_index,
            lambda: client.load_model("echo"),
            lambda: client.unload_model("echo"),
            lambda: client.register_system_shared_memory("r", "/r", 16),
            client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
            lambda: client.update_log_settings({"log_info": False}),
            lambda: client.update_trace_settings(settings={"trace_level": ["TENSORS"]}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
        key = service.server.http._headers[triton_access.HEADER]
        rows = client.get_model_repository_index({f"triton-grpc-protocol-{triton_access.HEADER}": key}).models
        assert {row.name for row in rows} == {"echo", "fastertransformer", "second"}
        assert (
            client.is_server_ready() and not client.is_model_ready("none") and client.is_model_ready("echo")
        )
        assert client.get_model_metadata("echo") and client.get_model_config("echo")
        assert client.get_inference_statistics() and client.get_server_metadata()
    assert "ECHO" in post(
        service, "echo", b'{"inputs": [{"name": "TEXT", "shape": [1], "datatype": "UINT32", "data": [0]}]}'
    )
    sockets = [one.laddr for one in service.triton.net_connections() if one.status == "LISTEN"]
    listening = {address.ip.replace("::ffff:", "") for address in sockets}
    assert listening == {"127.0.0.1"}
    assert key not in " ".join(service.triton.cmdline())


def test_no_region_of_shared_memory_is_readable_by_others(service):
    regions = [SHM / name for name in os.listdir(SHM) if name.startswith(service._shm_prefix)]
    assert len(regions) == 3
    wait_until(lambda: all(region.stat().st_mode & 0o077 == 0 for region in regions), 60)
