"""One-pass heads from files: through train-draft, build-repo and an engine; on ranks; and bad settings."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, SIZES, generate
from tests.backend.engine.test_lookup import learning_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.engine.trained_repositories import QUIET, SETTINGS, loaded, trained_repository
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.drafters.trained_loading import trained_info
from tridecode.backend.engine.device.memory import plan_rank
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import read_model_config
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.evaluate.in_process import repository_engine
from tridecode.tools.train_draft.run import Job, train_draft
from tridecode.tools.train_draft.training import Plan


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Build a repository with heads that are briefly trained on the model's own texts."""
    return trained_repository(
        tmp_path_factory.mktemp("heads"), "heads", Plan(3, epochs=30, batch=128, rate=3e-3)
    )


def test_a_repository_with_heads_answers_as_without(repository: Path) -> None:
    assert repository_engine(repository)[1].speculation == "heads"
    prompts, params = prompts_of([5, 11, 1, 8], 300), SamplingParams(max_tokens=30)
    plain = generate(loaded(repository, speculation="off"), prompts, params)
    offline = loaded(repository)
    assert [one.tokens for one in generate(offline, prompts, params)] == [one.tokens for one in plain]
    learning = learning_of(offline)
    assert learning.drafted["heads"] > 100
    assert offline.engine.most_drafts == 3, "heads make 3 drafts, max_draft_tokens allows 7"
    assert dict(learning.metrics())['draft_tokens{drafter="heads"}'] == learning.drafted["heads"]


def test_heads_are_in_the_memory_plan(repository: Path) -> None:
    weights, config = repository_engine(repository)
    model, cpu = read_model_config(weights), torch.device("cpu")
    path = str(repository / "fastertransformer" / config.draft_path)
    with_heads = resolve(replace(config, draft_path=path, **SETTINGS), model, cpu)
    without = replace(with_heads, speculation="off")
    more = plan_rank(model, with_heads, 0, 0, "cpu").weights - plan_rank(model, without, 0, 0, "cpu").weights
    info = trained_info(with_heads, model)
    size = model.hidden_size
    assert more == 4 * (info.width * (2 * size + 1 + 3 * size) + size)


def test_heads_of_another_checkpoint_are_a_warning(repository: Path, tmp_path: Path, caplog) -> None:
    weights, config = repository_engine(repository)
    draft = repository / "fastertransformer" / "draft"
    info = json.loads((draft / "draft.json").read_text())
    (tmp_path / "draft.safetensors").write_bytes((draft / "draft.safetensors").read_bytes())
    (tmp_path / "draft.json").write_text(json.dumps({**info, "target": "ab" * 32}))
    with caplog.at_level(logging.WARNING, logger="tridecode.engine"):
        OfflineEngine.load(weights, replace(config, draft_path=str(draft), **SETTINGS))
        assert "trained for" not in caplog.text
        OfflineEngine.load(weights, replace(config, draft_path=str(tmp_path), **SETTINGS))
    assert "trained for the checkpoint abababababab" in caplog.text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"draft_path": "none"}, "draft_path none; wanted the folder that `tridecode train-draft` wrote"),
        ({"pipeline_para_size": 2}, "with pipeline_para_size 2; wanted 1"),
        ({"draft_path": "/nowhere"}, "/nowhere/draft.json: No such file or directory"),
    ],
)
def test_settings_that_do_not_fit_are_named(repository: Path, settings: dict, wanted: str) -> None:
    weights, _ = repository_engine(repository)
    draft = str(repository / "fastertransformer" / "draft")
    config = EngineConfig(**{"speculation": "heads", "draft_path": draft, **settings})
    with pytest.raises(ConfigError, match=wanted):
        trained_info(config, read_model_config(weights))


def test_heads_of_another_model_are_refused(repository: Path, tmp_path: Path) -> None:
    other = save(FAMILIES["gpt2"](), tmp_path / "hf")
    draft = repository / "fastertransformer" / "draft"
    with pytest.raises(TridecodeError, match="has hidden_size"):
        build_repo(other, tmp_path / "repo", draft=draft, dtype="fp32", parity=False, console=QUIET)
    assert not (tmp_path / "repo").exists()


def test_random_weights_have_random_heads(repository: Path) -> None:
    offline = loaded(repository, weights="random")
    generate(offline, prompts_of([5], 300), SamplingParams(max_tokens=4))
    weights, config = repository_engine(repository)
    model = read_model_config(weights)
    config = replace(config, draft_path="none", weights="random", **SETTINGS)
    offline = OfflineEngine.load(weights, config)
    assert offline.engine.most_drafts == 4 and model.vocab_size


@pytest.mark.parametrize("sampled", [False, True])
def test_tensor_ranks_draft_the_same(tmp_path: Path, sampled: bool) -> None:
    shared = FAMILIES["llama"](**{**FAMILIES["llama"].shared, "vocab_size": 97})
    plan_conversion(open_checkpoint(str(save(shared, tmp_path / "hf"))), "fp32").write(tmp_path / "w")
    plan = Plan(3, epochs=20, batch=128, rate=3e-3)
    train_draft(
        Job(str(tmp_path / "w"), tmp_path / "draft", "heads", plan, 1, 1000, 32, 2, 0.0, device="cpu"), QUIET
    )
    prompts = prompts_of([5, 11, 1, 8, 17], 97)
    params = SAMPLED if sampled else SamplingParams(max_tokens=30)
    sizes = {**SIZES, "max_sequence_tokens": 64}
    (plain, _) = on_ranks(tmp_path / "w", 1, 1, lambda one: generate(one, prompts, params), **sizes)
    drafted = {**sizes, "speculation": "heads", "draft_path": str(tmp_path / "draft")}

    def use(offline: OfflineEngine):
        learning_of(offline).policy.costs = None
        return generate(offline, prompts, params, 2), learning_of(offline).accepted["heads"]

    found = {degree: on_ranks(tmp_path / "w", degree, 1, use, **drafted)[0] for degree in (1, 2)}
    for done, _ in found.values():
        for one, other in zip(done, plain, strict=True):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert found[1][1] == found[2][1] > 0, "the ranks draft what one rank drafts"
