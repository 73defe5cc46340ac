"""`tridecode bench engine --quantization`: a preset's random weights, rounded while they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.tools.bench.engines.ours import bench_engine, open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.shapes.presets import QUANTIZATIONS

SMALL = {"device": "cpu", "batches": (2,), "prompt_tokens": 4, "output_tokens": 5, "repeats": 1}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_preset_runs_quantised(name: str):
    found = bench_engine(make_job("toy", None, "fp32", quantization=name, **SMALL))
    # step_ms is the difference of two runs, which may be negative on a loaded machine
    assert found["batches"][0]["steady_step_ms"] > 0


def test_the_matrices_of_layers_are_what_is_rounded():
    job = make_job("toy", None, "fp32", quantization="w8a8-int8", **SMALL)
    with open_engine(job) as engine:
        layer = engine.state.model.layers[0]
        for linear in (layer.qkv, layer.dense, layer.up, layer.down):
            assert isinstance(linear.weight, QuantizedWeight)
            assert (linear.weight.format, linear.weight.activations) == ("int8", "int8")


def test_other_names_and_directories_are_refused():
    with pytest.raises(ConfigError, match="--quantization is 'int3'; wanted one of int8, fp8, int4"):
        make_job("toy", None, None, quantization="int3", **SMALL)
    with pytest.raises(ConfigError, match="/weights has its own"):
        make_job("toy", Path("/weights"), None, quantization="int8", **SMALL)
