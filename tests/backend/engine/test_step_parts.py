"""Optional features of a step are parts: the core of a step names none of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap

import pytest

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.parts.table import RUNS
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.parts.table import PARTS
from tridecode.backend.engine.ranks.agreement import StepDigest
from tridecode.backend.engine.schedule.output_processor import OutputProcessor
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.plan import StepPlan, StepResult

CORE = {
    *("step", "token_ids", "positions", "kv_slots", "block_tables", "context_lens", "query_starts"),
    *("slots", "samples", "num_decodes", "queries", "starts", "late"),
}
#: fields of a plan that stay on rank 0
OF_RANK_0 = {"sequences", "missed"}
#: words of the features that are parts
FEATURES = (
    "adapter",
    "prompt_table",
    "beam",
    "candidate",
    "top_",
    "logit_",
    "embed",
    "fork",
    "copies",
    "mask",
    "grammar",
)


def test_the_plan_and_its_results_have_the_core_and_parts() -> None:
    assert {field.name for field in dataclasses.fields(StepPlan)} == CORE | OF_RANK_0 | {"parts"}
    assert {field.name for field in dataclasses.fields(StepResult)} == {
        "tokens",
        "log_probs",
        "accepted",
        "found",
        "parts",
    }
    sizes = {"num_tokens", "num_rows", "num_columns"}
    assert set(plan_frame._Frame.__struct_fields__) == CORE | sizes | {"parts"}


@pytest.mark.parametrize(
    "function",
    [
        Engine.launch,
        Engine._replay,
        Engine._replay_prompts,
        Pending,
        Scheduler.commit,
        OutputProcessor.commit,
        StepDigest.committed,
    ],
    ids=lambda one: one.__qualname__,
)
def test_the_path_of_a_step_names_no_feature(function) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {name for name in names for word in FEATURES if word in name.lower()}


def test_every_part_has_a_device_side_and_a_tag_of_its_own() -> None:
    assert set(RUNS) == set(PARTS.values()) and len(PARTS) == len(RUNS)
    assert all(cls.__module__.startswith("tridecode.backend.engine.parts.") for cls in PARTS.values())
