"""Model `tridecode_health`: is the engine able to generate a token now?

Triton's own readiness stays true when a model's process or engine has died; this model asks the engine for
one token and answers READY, or UNAVAILABLE with the reason, within probe_timeout_s.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from tridecode.backend.doors.door import EngineDoor, Outputs
from tridecode.backend.doors.fields import FLAG, Field
from tridecode.backend.doors.senders import Stream
from tridecode.backend.errors import EngineDownError
from tridecode.backend.messages import EngineBeat, Event, SamplingParams, SequenceRequest

_PROBE = SamplingParams(max_tokens=1)


class TritonPythonModel(EngineDoor):
    """Outputs READY BOOL [1], PHASE STRING [1], DETAIL STRING [1]; no input is needed."""

    table = (Field("PROBE", FLAG),)  # a placeholder: a model of Triton's has at least one input

    def accept(self, request: Any, stream: Stream) -> None:
        inputs, parameters = self.read(request, stream)
        start_id = self.limits().start_id
        stream.answer = _Ready(self, Outputs(self.settings.outputs, request.requested_output_names()))
        stream.requests = [self.link.reserve()]
        sequence = SequenceRequest(np.array([max(0, start_id)], "<i4").tobytes(), _PROBE)
        schedule = {**self.schedule(request, inputs, parameters), "timeout_s": self.settings.probe_timeout_s}
        self.link.submit(stream.requests[0], [sequence], stream.put, **schedule)
        timer = threading.Timer(self.settings.probe_timeout_s, self._give_up, (stream,))
        timer.daemon = True
        timer.start()

    def _give_up(self, stream: Stream) -> None:
        seconds = self.settings.probe_timeout_s
        stream.fail(EngineDownError(f"the engine has not generated a token within {seconds:g} s"))


class _Ready:
    def __init__(self, door: TritonPythonModel, outputs: Outputs):
        self.finished = False
        self.num_output_tokens = 0
        self._door, self._outputs, self._began = door, outputs, time.monotonic()

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        self.num_output_tokens += sum(len(event.tokens) for _, event in events)
        self.finished = any(event.finish for _, event in events)
        if not self.finished:
            return []
        detail = f"one token in {1000 * (time.monotonic() - self._began):.1f} ms"
        beat = self._door.link.beat()
        detail += _load(beat) if beat is not None else ""
        phase = self._door.link.state().phase
        return [
            self._outputs.tensors({"READY": [True], "PHASE": [phase.encode()], "DETAIL": [detail.encode()]})
        ]


def _load(beat: EngineBeat) -> str:
    return (
        f"; engine {beat.epoch}: {beat.running} running, {beat.waiting} waiting, "
        f"{beat.free_blocks} of {beat.total_blocks} blocks free"
    )
