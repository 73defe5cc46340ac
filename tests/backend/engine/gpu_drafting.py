"""Engines that draft on a GPU, and what all their drafters keep."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.draft_files import TrainedDraft
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.train_draft.texts import Text

LENGTHS = [1, 7, 30, 33, 9]
NEW = 40
SIZES = dict(max_sequences=64, max_step_tokens=128, max_sequence_tokens=128, data_type="fp32")


def drafting(model, speculation: str, **settings) -> OfflineEngine:
    """Return an engine that verifies every draft, whatever the steps of this machine cost."""
    offline = gpu_engine(model, keep_logits=False, speculation=speculation, **{**SIZES, **settings})
    learning = learning_of(offline)
    assert learning.policy.costs is not None and learning.policy.costs.several
    learning.policy.costs = None
    return offline


def own_texts(model, prompts: list[list[int]], **settings) -> list[Text]:
    """Return greedy answers of an engine with these settings: in 16 bit they differ from those in fp32."""
    done = generate(
        gpu_engine(model, keep_logits=False, **{**SIZES, **settings}), prompts, SamplingParams(max_tokens=NEW)
    )
    return [Text(np.array(prompt + one.tokens, np.int32), len(prompt)) for prompt, one in zip(prompts, done)]


def check_repeated(offline: OfflineEngine, prompts, params, plain) -> None:
    """Compare the answers with the plain ones twice, the second time behind cached prefixes."""
    for _ in range(2):
        done = generate(offline, prompts, params, depth=2)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        for one, other in zip(done, plain, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def check_answers(
    name: str, kind: str, trained: TrainedDraft, graphs: bool, drafter: type, share: float = 0.3
) -> None:
    """Compare a trained drafter's answers with those of an engine without drafts, and look that it drafts
    well, in graphs where they are on. share: of greedy drafts that must be right, at least."""
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    for params in (SamplingParams(max_tokens=NEW), SAMPLED):
        plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
        offline = drafting(model, kind, trained=trained, cuda_graphs=graphs)
        learning = learning_of(offline)
        check_repeated(offline, prompts, params, plain)
        assert learning.drafted[kind] > 60
        if isinstance(params, SamplingParams):
            assert learning.accepted[kind] > share * learning.drafted[kind]
        found = offline.engine.drafter
        assert isinstance(found, drafter) and (found.replayed > 20) == graphs
