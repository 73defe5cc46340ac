"""docs/reference/metrics.md has the metrics that the models publish, and the engine has no others."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine import loop
from tridecode.backend.engine.grammars.counts import GrammarCounts
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.parts import shadow
from tridecode.backend.engine.schedule.admission import Counters
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.service.monitoring.metric_table import ALL_METRICS, ENGINE_METRICS, REPEATED
from tridecode.tools.generated_docs.metrics import COMMAND, PAGE, main


def test_the_tables_of_the_page_are_those_of_the_code():
    assert main([]) == 0, f"run {COMMAND} --write"


def test_the_page_names_no_metric_that_does_not_exist():
    known = {name for row in ALL_METRICS for name in (row.name, *row.families)}
    known |= {f"{row.name}_bucket" for row in ALL_METRICS if row.bounds}
    named = set(re.findall(r"\btridecode_\w+", PAGE.read_text())) - {"tridecode_health"}
    assert named <= known


def test_every_value_of_the_heartbeat_has_a_metric():
    sources = [Path(str(module.__file__)).read_text() for module in (loop, shadow)]
    names = {field.name for field in fields(Counters)}
    block = re.search(r"status\.metrics = \{(.*?)\n        \}", sources[0], re.DOTALL)
    parts = [
        block[1],
        *map(
            inspect.getsource,
            (DecodeLoop._cached_tokens, HostTier.metrics, Learning.metrics, GrammarCounts.metrics),
        ),
    ]
    for part in parts:
        names |= set(re.findall(r'"(\w+)":', part)) | set(re.findall(r"'(\w+)\{", part))
    names |= set(re.findall(r"[\"'](shadow_\w+?)(?=[\"'{])", sources[1]))
    names = {name.removesuffix("_per_token") for name in names} - {row.name for row in fields(EngineConfig)}
    assert names - REPEATED == set(ENGINE_METRICS)


def test_names_and_helps_follow_prometheus():
    for row in ALL_METRICS:
        assert re.fullmatch(r"tridecode_[a-z0-9_]+", row.name)
        assert (row.kind == "counter") == row.name.endswith("_total")
        assert len(row.help.split()) >= 4 and row.help.replace("_", " ") != row.name.replace("_", " ")
        assert row.bounds == tuple(sorted(set(row.bounds)))
    names = [name for row in ALL_METRICS for name in row.families]
    assert len(names) == len(set(names)) and len({row.help for row in ALL_METRICS}) == len(ALL_METRICS)
