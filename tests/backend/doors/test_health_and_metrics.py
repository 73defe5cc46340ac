"""The health model and the metrics, which must say what is."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import LIMITS, FakeEngine
from tests.waiting import wait_until
from tridecode.backend.doors import fastertransformer, health
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest

OUTPUTS = {"READY": "TYPE_BOOL", "PHASE": "TYPE_STRING", "DETAIL": "TYPE_STRING"}


@pytest.fixture()
def door():
    config = fake_triton.model_config(
        "tridecode_health", {"PROBE": "TYPE_BOOL"}, OUTPUTS, {"probe_timeout_s": "0.5", "hold_s": "0.2"}
    )
    with running(health.TritonPythonModel, config, FakeEngine(beat_s=0.02)) as door:
        yield door


def probe(door):
    return fake_triton.ask(door, fake_triton.InferenceRequest({"PROBE": np.array([[True]])}))


def test_a_ready_engine_says_so_without_being_asked_for_anything(door):
    wait_until(lambda: door.link.beat())
    out = only(probe(door))
    assert out["READY"].tolist() == [True] and out["READY"].dtype == np.bool_
    assert out["PHASE"].tolist() == [b"ready"]
    assert b"0 running" in out["DETAIL"][0] and b"90 of 100 blocks free" in out["DETAIL"][0]
    assert door.test_engine.submits == []


def test_a_probe_needs_no_input_and_no_input_can_fail_it(door):
    wait_until(lambda: door.link.beat())
    for inputs in ({}, {"PROBE": np.zeros((3, 5), bool)}, {"other": np.array([b"\xff"], np.object_)}):
        request = fake_triton.InferenceRequest(inputs, parameters={"nobody": "knows it"})
        assert only(fake_triton.ask(door, request))["READY"].tolist() == [True]


def test_a_probe_is_answered_at_once_while_the_queue_is_full(door):
    engine = door.test_engine
    engine.step_s = 0.02
    submit = [SequenceRequest(np.array([5], "<i4").tobytes(), SamplingParams(max_tokens=400))]
    for _ in range(LIMITS.max_queued_requests):
        door.link.submit(door.link.reserve(), submit, lambda event: None)
    wait_until(lambda: engine.running == LIMITS.max_queued_requests)
    wait_until(lambda: door.link.beat() and door.link.beat().running == LIMITS.max_queued_requests)
    threads = threading.active_count()
    seconds = []
    for _ in range(500):
        began = time.monotonic()
        out = only(probe(door))
        seconds.append(time.monotonic() - began)
        assert out["READY"].tolist() == [True] and b"256 running" in out["DETAIL"][0]
    assert sorted(seconds)[495] < 0.1
    assert threading.active_count() <= threads
    assert len(engine.submits) == LIMITS.max_queued_requests


def test_a_dead_engine_is_unavailable_with_the_reason(door):
    door.test_engine.stop()
    door.test_supervisor.set_phase("down", "rank 0 was killed by signal 9")
    wait_until(lambda: door.link.state().phase == "down")
    code, text = refusal(probe(door))
    assert code == "UNAVAILABLE" and "killed by signal 9" in text


def test_a_silent_engine_is_unavailable_while_the_supervisor_still_calls_it_ready(door, monkeypatch):
    monkeypatch.setattr(health, "_SILENCE_S", 0.3)
    wait_until(lambda: door.link.beat())
    door.test_engine.freeze()
    wait_until(lambda: door.link.silent_s() > 0.3)
    assert door.link.state().phase == "ready"
    code, text = refusal(probe(door))
    assert code == "UNAVAILABLE" and "has been silent for 0." in text
    door.test_engine.thaw()
    wait_until(lambda: door.link.silent_s() < 0.2)
    assert only(probe(door))["READY"].tolist() == [True]


def beats_say(door, steps: int, busy_s: float, step_seconds: float) -> None:
    engine = door.test_engine
    engine.steps, engine.busy_s, engine.metrics = steps, busy_s, {"step_seconds": step_seconds}
    wait_until(
        lambda: door.link.beat() and (door.link.beat().steps, door.link.beat().busy_s) == (steps, busy_s)
    )


def test_a_step_that_does_not_end_is_unavailable_though_the_engine_beats(door):
    beats_say(door, steps=1000, busy_s=0.4, step_seconds=1.0)
    assert only(probe(door))["READY"].tolist() == [True]
    beats_say(door, steps=1000, busy_s=0.6, step_seconds=1.0)
    code, text = refusal(probe(door))
    assert code == "UNAVAILABLE" and "the running step has taken 0.6 s; wanted at most 0.5 s" in text


def test_a_long_step_of_an_engine_whose_steps_are_long_is_progress(door):
    beats_say(door, steps=10, busy_s=20.0, step_seconds=3.0)  # limit: 100 steps of 0.3 s
    assert only(probe(door))["READY"].tolist() == [True]
    beats_say(door, steps=10, busy_s=31.0, step_seconds=3.0)
    assert refusal(probe(door))[0] == "UNAVAILABLE"
    beats_say(door, steps=0, busy_s=31.0, step_seconds=0.0)  # the first: nobody knows how long they are
    assert only(probe(door))["READY"].tolist() == [True]


@pytest.fixture()
def registry():
    fake_triton.MetricFamily.registry.clear()
    return fake_triton.MetricFamily.registry


def value(registry, name, **labels) -> float:
    """0 as long as nothing was published."""
    metric = registry[name].metrics.get(tuple(sorted(labels.items()))) if name in registry else None
    return metric.value() if metric else 0.0


def test_a_label_in_the_name_of_an_engine_s_value_becomes_a_label(registry):
    outputs = {"output_ids": "TYPE_UINT32", "sequence_length": "TYPE_UINT32"}
    config = fake_triton.model_config("fastertransformer", {}, outputs)
    with running(fastertransformer.TritonPythonModel, config, FakeEngine(beat_s=0.02)) as door:
        buckets = {'shadow_kl_bucket{le="0.01"}': 3.0, 'shadow_kl_bucket{le="+Inf"}': 5.0}
        door.test_engine.metrics = {**buckets, "shadow_kl_count": 5.0}
        wait_until(lambda: door.link.beat() and "shadow_kl_count" in door.link.beat().metrics)
        door.metrics.publish()
        name, engine = "tridecode_engine_shadow_kl", {"engine": "fastertransformer"}
        assert value(registry, f"{name}_bucket", le="0.01", **engine) == 3
        assert value(registry, f"{name}_bucket", le="+Inf", **engine) == 5
        assert value(registry, f"{name}_count", **engine) == 5
        assert registry[f"{name}_bucket"].description.startswith("Mean KL divergence per token")


def test_metrics_equal_what_the_clients_saw(registry):
    outputs = {"output_ids": "TYPE_UINT32", "sequence_length": "TYPE_UINT32"}
    config = fake_triton.model_config("fastertransformer", {}, outputs)
    with running(fastertransformer.TritonPythonModel, config, FakeEngine(beat_s=0.02)) as door:
        for length in (3, 4):
            arrays = {
                "input_ids": np.array([[5], [6]], np.uint32),
                "input_lengths": np.array([[1], [1]], np.uint32),
                "request_output_len": np.array([[length], [length]], np.uint32),
            }
            only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
        refusal(fake_triton.ask(door, fake_triton.InferenceRequest({"input_ids": arrays["input_ids"]})))
        wait_until(lambda: door.link.beat())
        model = {"model": "fastertransformer"}

        def count(outcome: str) -> float:
            door.metrics.publish()
            return value(registry, "tridecode_requests_total", outcome=outcome, **model)

        wait_until(lambda: (count("ok"), count("invalid_arg")) == (2, 1))  # after the answer has been sent
        assert value(registry, "tridecode_output_tokens_total", **model) == 2 * (3 + 4)
        engine = {"engine": "fastertransformer"}
        assert value(registry, "tridecode_engine_ready", **engine) == 1
        assert value(registry, "tridecode_engine_free_blocks", **engine) == 90
        door.metrics.publish()
        assert value(registry, "tridecode_requests_total", outcome="ok", **model) == 2
        door.test_engine.stop()
        door.test_supervisor.set_phase("down", "gone")
        wait_until(lambda: door.link.beat() is None)
        door.metrics.publish()
        assert value(registry, "tridecode_engine_ready", **engine) == 0
