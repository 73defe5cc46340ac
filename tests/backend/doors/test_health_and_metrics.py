"""The health model and the metrics, which must say what is."""

from __future__ import annotations

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import FakeEngine
from tests.waiting import wait_until
from tridecode.backend.doors import fastertransformer, health

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


def test_a_ready_engine_says_so_after_one_token(door):
    wait_until(lambda: door.link.beat())
    out = only(probe(door))
    assert out["READY"].tolist() == [True] and out["READY"].dtype == np.bool_
    assert out["PHASE"].tolist() == [b"ready"]
    assert b"one token in" in out["DETAIL"][0] and b"90 of 100 blocks free" in out["DETAIL"][0]
    assert door.test_engine.submits[-1].sequences[0].params.max_tokens == 1


def test_a_dead_engine_is_unavailable_with_the_reason(door):
    door.test_engine.stop()
    door.test_supervisor.set_phase("down", "rank 0 was killed by signal 9")
    wait_until(lambda: door.link.state().phase == "down")
    code, text = refusal(probe(door))
    assert code == "UNAVAILABLE" and "killed by signal 9" in text


def test_a_stuck_engine_is_unavailable_in_time(door):
    door.test_engine.freeze()
    code, text = refusal(probe(door))
    assert code == "UNAVAILABLE" and "has not generated a token within 0.5 s" in text
    door.test_engine.thaw()


@pytest.fixture()
def registry():
    fake_triton.MetricFamily.registry.clear()
    return fake_triton.MetricFamily.registry


def value(registry, name, **labels) -> float:
    """0 as long as nothing was published."""
    metric = registry[name].metrics.get(tuple(sorted(labels.items()))) if name in registry else None
    return metric.value() if metric else 0.0


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
