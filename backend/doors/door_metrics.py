"""A door's metrics on Triton's /metrics page: its requests, and the values of the engine's heartbeat.

Counters have the door's name as a label: each door counts its own requests. The engine's values are gauges,
so that several doors can report the same engine.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from typing import Any

import triton_python_backend_utils as pb_utils

from tridecode.backend.doors.engine_link import EngineLink
from tridecode.backend.messages import EngineBeat

_EVERY_S = 1.0  # publishing a value is a round trip to the server; a request only adds to a dict

_log = logging.getLogger("tridecode.door")


class DoorMetrics:
    """Counts ended streams and publishes the counts once a second, on a thread of its own.

    Without custom metrics in this Triton, or with --allow-metrics=false, it only counts.
    """

    def __init__(self, door: str, engine: str, link: EngineLink):
        self._door, self._engine, self._link = door, engine, link
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # (metric, outcome) -> not yet published
        self._metrics: dict[tuple, Any] = {}
        self._families: dict[str, Any] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        if hasattr(pb_utils, "MetricFamily"):
            self._thread.start()

    def count(self, stream: Any, outcome: str) -> None:
        """A stream has ended."""
        self.count_request(outcome, stream.answer.num_output_tokens if stream.answer is not None else 0)

    def count_request(self, outcome: str, tokens: int = 0) -> None:
        """A request has ended. outcome: "ok" or an error's code in lower case."""
        with self._lock:
            self._counts["tridecode_requests_total", outcome] += 1
            self._counts["tridecode_output_tokens_total", ""] += tokens

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * _EVERY_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(_EVERY_S)
            try:
                self.publish()
            except Exception:
                _log.exception("metrics are switched off: the server refuses them")
                return

    def publish(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for (name, outcome), value in counts.items():
            labels = {"model": self._door, **({"outcome": outcome} if outcome else {})}
            self._metric(name, labels, pb_utils.MetricFamily.COUNTER).increment(value)
        beat = self._link.beat()
        for name, gauge in (_gauges(beat) if beat else {"tridecode_engine_ready": 0.0}).items():
            name, labels = _labels(name)
            self._metric(name, {"engine": self._engine, **labels}, pb_utils.MetricFamily.GAUGE).set(gauge)

    def _metric(self, name: str, labels: dict[str, str], kind: Any) -> Any:
        key = (name, *sorted(labels.items()))
        if key not in self._metrics:
            if name not in self._families:
                text = _HELP.get(name, name.replace("_", " "))
                family = pb_utils.MetricFamily(name=name, description=text, kind=kind)
                self._families[name] = _immortal(family)
            self._metrics[key] = _immortal(self._families[name].Metric(labels=labels))
        return self._metrics[key]


def _immortal(thing: Any) -> Any:
    """Never destroy `thing`: a metric's destructor can crash stub or server at exit (seen on Triton 2.51)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


#: field of EngineBeat -> its gauge, and the gauge's help
_BEAT = {
    "running": ("tridecode_engine_running", "Sequences that have a slot"),
    "waiting": ("tridecode_engine_waiting", "Sequences that wait for a slot"),
    "free_blocks": ("tridecode_engine_free_blocks", "Free blocks of the KV cache"),
    "total_blocks": ("tridecode_engine_blocks", "Blocks of the KV cache"),
    "steps": ("tridecode_engine_steps", "Steps since the engine started"),
    "epoch": ("tridecode_engine_epoch", "Number of times the engine has been built"),
}
#: of shadow runs (docs/quantization.md)
_SHADOW = {
    "ended": "Sequences that ended, of which a share is chosen for shadow runs",
    "queued": "Sequences that wait for their shadow run",
    "dropped": "Chosen sequences that found the queue of shadow runs full",
    "failed": "Shadow runs that failed",
    "skipped": "Chosen sequences that cannot be compared, by reason",
    "seconds": "Time spent in shadow runs",
    "tokens": "Generated tokens that shadow runs compared",
    "tokens_agreeing": "Of them, those where the 16-bit model has the same greedy token",
    "tokens_kl": "Sum over them of the KL divergence from the 16-bit model, in nats",
    "kl_bucket": "Shadow runs by their mean KL divergence a token, in nats",
    "kl_sum": "Sum of the mean KL divergences of shadow runs, in nats",
    "kl_count": "Shadow runs that ended",
    "agreement_bucket": "Shadow runs by the share of greedy tokens that agree",
    "agreement_sum": "Sum of the shares of greedy tokens that agree",
    "agreement_count": "Shadow runs that ended",
}
_HELP = {
    "tridecode_requests_total": "Requests that ended, by outcome: ok, or the error's code",
    "tridecode_output_tokens_total": "Tokens generated for ended requests of this door",
    "tridecode_engine_ready": "1 while the engine sends heartbeats, 0 while it is being rebuilt",
    **dict(_BEAT.values()),
    **{f"tridecode_engine_shadow_{name}": text for name, text in _SHADOW.items()},
}


def _labels(name: str) -> tuple[str, dict[str, str]]:
    """A name of EngineBeat.metrics without its label, if it has one, as in `shadow_kl_bucket{le="1"}`."""
    name, has_label, label = name.partition("{")
    if not has_label:
        return name, {}
    key, _, value = label.removesuffix("}").partition("=")
    return name, {key: value.strip('"')}


def _gauges(beat: EngineBeat) -> dict[str, float]:
    values = {gauge: float(getattr(beat, field)) for field, (gauge, _) in _BEAT.items()}
    for name, value in beat.metrics.items():
        values[name if name.startswith("tridecode_") else f"tridecode_engine_{name}"] = float(value)
    return {"tridecode_engine_ready": 1.0, **values}
