"""Builds the Job of a load of `tridecode bench prefix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tridecode.backend.models import read_model_config
from tridecode.tools.bench.engines.ours import weight_directory
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.prefix.run import PrefixPlan, traffic_of
from tridecode.tools.bench.shapes.presets import preset as find_preset


def prefix_job(
    plan: PrefixPlan, preset: str, directory: Path | None, dtype: str | None, **fields: Any
) -> Job:
    """Return the job of an engine for the plan's longest sequence. fields: the others of Job.

    Raises ConfigError as make_job does.
    """
    shape = read_model_config(weight_directory(directory)) if directory else find_preset(preset).model
    longest = traffic_of(plan, shape.vocab_size, plan.seed).longest
    return make_job(
        preset, directory, dtype, prompt_tokens=longest - 1, output_tokens=1, prefix_cache=True, **fields
    )
