"""Repositories whose drafter `train-draft` has made from the texts of their own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.backend.engine.step_watch import WatchedEngine
from tests.backend.engine.test_draft_steps import SIZES
from tests.backend.engine.test_lookup import learning_of
from tests.checkpoints import FAMILIES, save
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.evaluate.in_process import repository_engine
from tridecode.tools.train_draft.run import Job, train_draft
from tridecode.tools.train_draft.training import Plan

QUIET = Console(quiet=True)
SETTINGS = {**SIZES, "max_sequence_tokens": 64, "device": "cpu"}


def trained_repository(folder: Path, kind: str, plan: Plan) -> Path:
    """Build a repository of a small LLaMA with a briefly trained drafter; the drafter alone is in `draft`."""
    model = save(FAMILIES["llama"](), folder / "hf")
    train_draft(Job(str(model), folder / "draft", kind, plan, 1, 1500, 32, 2, 0.0, device="cpu"), QUIET)
    return build_repo(
        model, folder / "repo", draft=folder / "draft", dtype="fp32", parity=False, console=QUIET
    )


def loaded(repository: Path, **settings) -> OfflineEngine:
    """Return an engine that verifies every draft, whatever its cost."""
    weights, config = repository_engine(repository)
    path = str(repository / "fastertransformer" / config.draft_path)
    offline = WatchedEngine.load(weights, replace(config, draft_path=path, **{**SETTINGS, **settings}))
    if offline.engine.drafter is not None:
        learning_of(offline).policy.costs = None
    return offline
