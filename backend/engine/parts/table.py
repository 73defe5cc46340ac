"""Maps the tag of a part's frame to its class, and lists the features between steps. No torch."""

from __future__ import annotations

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
from tridecode.backend.engine.step.plan import StepPart

_PARTS: list[type[StepPart]] = [
    PromptTables,
    AdapterRows,
    Forks,
    Masks,
    DraftMasks,
    PromptVectors,
    ReturnedLogits,
    TopTokens,
    HostCopies,
    BeamRows,
    DraftSources,
    Drafting,
    DraftReads,
]
PARTS = {part.tag: part for part in _PARTS}

BACKGROUND: list[type[Background]] = [ShadowRuns]
