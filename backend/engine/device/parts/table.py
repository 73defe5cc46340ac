"""The device side of each part, and of each feature between steps."""

from __future__ import annotations

from typing import Any

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.parts.adapters import AdaptersRun
from tridecode.backend.engine.device.parts.background_run import BackgroundRun
from tridecode.backend.engine.device.parts.beams import BeamsRun
from tridecode.backend.engine.device.parts.draft_masks import DraftMasksRun
from tridecode.backend.engine.device.parts.embeddings import PromptVectorsRun
from tridecode.backend.engine.device.parts.forks import ForksRun
from tridecode.backend.engine.device.parts.host_copies import HostCopiesRun
from tridecode.backend.engine.device.parts.masks import MasksRun
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.parts.prompt_tables import PromptTablesRun
from tridecode.backend.engine.device.parts.returned_logits import LogitsRun
from tridecode.backend.engine.device.parts.shadow import ShadowScorer
from tridecode.backend.engine.device.parts.top_tokens import TopTokensRun
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.parts.background import Background
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.parts.draft_masks import DraftMasks
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.parts.draft_sources import DraftSources
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.parts.embeddings import PromptVectors
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.parts.masks import Masks
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.engine.parts.returned_logits import ReturnedLogits
from tridecode.backend.engine.parts.shadow import ShadowRuns
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.step.plan import StepPart, StepPlan

RUNS: dict[type[StepPart], type[PartRun[Any]]] = {
    PromptTables: PromptTablesRun,
    AdapterRows: AdaptersRun,
    Forks: ForksRun,
    Masks: MasksRun,
    DraftMasks: DraftMasksRun,
    PromptVectors: PromptVectorsRun,
    ReturnedLogits: LogitsRun,
    TopTokens: TopTokensRun,
    HostCopies: HostCopiesRun,
    BeamRows: BeamsRun,
    DraftSources: PartRun,  # the drafter reads these three (Engine.drafter)
    Drafting: PartRun,
    DraftReads: PartRun,
}
BACKGROUND_RUNS: dict[type[Background], type[BackgroundRun]] = {ShadowRuns: ShadowScorer}


def part_runs(state: DeviceState, plan: StepPlan) -> list[PartRun[Any]]:
    """Return the device side of the parts of a plan, for one step."""
    return [RUNS[type(part)](state, plan, part) for part in plan.parts]


def background_kinds(config: EngineConfig) -> dict[type[Background], type[BackgroundRun]]:
    """The features between steps that the settings turn on."""
    return {kind: run for kind, run in BACKGROUND_RUNS.items() if getattr(config, kind.switch)}
