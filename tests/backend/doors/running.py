"""A door in this process, as Triton would run it, in front of a fake engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from tests import fake_triton
from tests.fake_engine import FakeEngine, FakeSupervisor
from tests.waiting import wait_until

ERROR_NAMES = {
    fake_triton.TritonError.INVALID_ARG: "INVALID_ARG",
    fake_triton.TritonError.UNSUPPORTED: "UNSUPPORTED",
    fake_triton.TritonError.UNAVAILABLE: "UNAVAILABLE",
    fake_triton.TritonError.CANCELLED: "CANCELLED",
    fake_triton.TritonError.INTERNAL: "INTERNAL",
    fake_triton.TritonError.NOT_FOUND: "NOT_FOUND",
}


@contextlib.contextmanager
def door_at(model_class: type, config: dict, control: str, repository: str = "/nowhere") -> Iterator[Any]:
    """The door, initialized with the control endpoint."""
    door = model_class()
    logs = os.environ.get("TRIDECODE_REQUEST_LOG", "off")
    with mock.patch.dict(os.environ, TRIDECODE_CONTROL_ENDPOINT=control, TRIDECODE_REQUEST_LOG=logs):
        door.initialize(fake_triton.initialize_arguments(config, str(repository)))
        wait_until(lambda: door.link._connection.supervisor.socket, 15)  # health does not wait for it
    try:
        yield door
    finally:
        door.finalize()


@contextlib.contextmanager
def running(
    model_class: type, config: dict, engine: FakeEngine, repository: str = "/nowhere"
) -> Iterator[Any]:
    """The door with its own engine and supervisor, as attributes `test_engine` and `test_supervisor`."""
    with engine, FakeSupervisor(engine) as supervisor:
        with door_at(model_class, config, supervisor.endpoint, repository) as door:
            door.test_engine, door.test_supervisor = engine, supervisor
            yield door


def after_a_pause(door: Any, request: fake_triton.InferenceRequest) -> list[fake_triton.Sent]:
    """Responses of a `running` door to a client that reads the first one after all was generated."""
    gate = threading.Event()
    request.sender.before_send = lambda: gate.wait(60)
    before = len(door.test_engine.submits)
    door.execute([request])
    wait_until(lambda: len(door.test_engine.submits) > before and door.test_engine.running == 0)
    time.sleep(0.1)  # the last events are in flight to the door
    gate.set()
    assert request.sender.wait(60)
    return request.sender.sent


def only(sent: list[fake_triton.Sent]) -> dict[str, np.ndarray]:
    """The outputs of the only response, which must be final and without error."""
    assert len(sent) == 1, f"{len(sent)} responses"
    assert sent[0].error is None, sent[0].error
    assert sent[0].final
    return sent[0].outputs


def refusal(sent: list[fake_triton.Sent]) -> tuple[str, str]:
    """(code, text) of the only response, which must be a final error."""
    assert len(sent) == 1 and sent[0].final and sent[0].error is not None, sent
    return ERROR_NAMES[sent[0].error.code()], sent[0].error.message()
