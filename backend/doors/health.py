"""Model `tridecode_health`: reports whether the engine makes progress; with several engines, whether all do.

Triton's own readiness stays true when a model's process or the engine has died. This model answers from the
supervisor's last state, the engine's heartbeats and the age of the running step. A probe needs no queue, slot
or thread, so it is answered at once under any load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import EngineDownError, TridecodeError
from tridecode.backend.doors import huge_shapes
from tridecode.backend.doors.door import Outputs, refusal
from tridecode.backend.doors.door_settings import read_settings
from tridecode.backend.doors.monitoring.door_metrics import DoorMetrics
from tridecode.backend.doors.siblings import siblings
from tridecode.backend.doors.triton_owner import TritonOwner
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.error_texts import internal_error
from tridecode.backend.wire.messages import BEAT_S, EngineBeat, Welcome
from tridecode.backend.wire.taken_requests import TakenRequests

#: an engine that has missed eight heartbeats is stopped, starved or dead; the supervisor acts after 3 s
_SILENCE_S = 2.0
#: Longest step, as a multiple of the mean step; applies where that exceeds probe_timeout_s. On two CPU cores
#: a full prefill step takes about 70 times as long as a step of one decode row.
_MEAN_STEPS = 100

_log = logging.getLogger("tridecode.door")


class TritonPythonModel:
    """Serves the tensors of contracts/health.py; ignores inputs and parameters.

    The answer is READY = true, or the error UNAVAILABLE with the reason.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called by Triton. Does not wait for the engine: a probe reports its start."""
        huge_shapes.install()
        self.taken = TakenRequests()  # stays 0: execute() returns with the answers
        try:
            log_format.configure_door(args["model_instance_name"])
            self.settings = read_settings(args)
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        settings = self.settings
        self._listed, self._list = -2, dict[str, list]()  # modification time of the folder, and the outputs
        instance, engine_dir = args["model_instance_name"], str(settings.engine_dir)
        numbers = range(settings.num_engines)
        owner = TritonOwner.of_this_stub()
        self.links = [
            EngineLink(engine_dir, instance, owner, settings.hold_s, number=i).start() for i in numbers
        ]
        self.link = self.links[0]
        labels = [settings.engine_label(number) for number in numbers]
        gauges = [
            DoorMetrics(settings.name, label, link, settings.engine_dir)
            for label, link in zip(labels, self.links)
        ]
        self.metrics, self._all_metrics = gauges[0], gauges
        for metrics in gauges:
            metrics.start()

    def execute(self, requests: Sequence[Any]) -> list:
        """Called by Triton; return the responses, in order."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Called by Triton when the model is unloaded."""
        for metrics in self._all_metrics:
            metrics.close()
        for link in self.links:
            link.close()

    def _respond(self, request: Any) -> Any:
        try:
            detail = self._progress()
            values = {"READY": [True], "PHASE": [b"ready"], "DETAIL": [detail.encode()]}
            if limits := self.link.limits():
                values["ENGINE"] = [msgspec.json.encode(Welcome(self.link.state().epoch, limits))]
            values.update(self._models())
            outputs = Outputs(self.settings.outputs, request.requested_output_names())
            response = pb_utils.InferenceResponse(outputs.tensors(values))
        except TridecodeError as error:
            self.metrics.count_request(error.code.lower())
            return refusal(error)
        except Exception as error:
            _log.exception("a probe could not be answered")
            self.metrics.count_request("internal")
            return refusal(internal_error(error, ""))
        self.metrics.count_request("ok")
        return response

    def _models(self) -> dict[str, list]:
        """Return the repository's models by name, and whether each streams.

        Reread when the folder changes.
        """
        try:
            changed = self.settings.repository.stat().st_mtime_ns
        except OSError:
            changed = -1
        if changed != self._listed:
            models = siblings(self.settings.repository)
            self._list = {
                "MODELS": [model.name.encode() for model in models],
                "STREAMS": [model.streams for model in models],
            }
            self._listed = changed
        return self._list

    def _progress(self) -> str:
        """Describe the load of all engines. Raises EngineDownError if one of them makes no progress."""
        if len(self.links) == 1:
            return self._progress_of(self.links[0])
        words = []
        for number, link in enumerate(self.links):
            try:
                words.append(f"{number}: {self._progress_of(link)}")
            except EngineDownError as error:
                raise EngineDownError(f"engine {number} of {len(self.links)}: {error}") from None
        return "; ".join(words)

    def _progress_of(self, link: EngineLink) -> str:
        """Describe the engine's load. Raises EngineDownError with the reason if it makes no progress."""
        state, silent_s, beat = link.state(), link.silent_s(), link.beat()
        if state.phase != "ready":
            raise EngineDownError(f"the engine is not ready ({state.phase}): {state.detail}")
        if silent_s > _SILENCE_S:
            raise EngineDownError(
                f"the engine has been silent for {silent_s:.1f} s; it sends a heartbeat every {BEAT_S:g} s"
            )
        if beat is None:
            return f"engine {state.epoch}: connected, no heartbeat yet"
        limit_s = self._step_limit_s(beat)
        busy_s = beat.busy_s + silent_s
        if limit_s and busy_s > limit_s:
            raise EngineDownError(
                f"the running step has taken {busy_s:.1f} s; wanted at most {limit_s:.1f} s "
                "(probe_timeout_s in config.pbtxt, or 100 mean steps)"
            )
        return (
            f"engine {beat.epoch}: {beat.steps} steps, {beat.running} running, {beat.waiting} waiting, "
            f"{beat.free_blocks} of {beat.total_blocks} blocks free"
        )

    def _step_limit_s(self, beat: EngineBeat) -> float:
        """Return the time limit of the running step in seconds; 0: no limit, as no step has ended yet.

        The supervisor's limit, step_timeout_s, applies in any case.
        """
        if not beat.busy_s or not beat.steps:
            return 0.0
        mean_s = beat.metrics.get("step_seconds", 0.0) / beat.steps
        return max(self.settings.probe_timeout_s, _MEAN_STEPS * mean_s)
