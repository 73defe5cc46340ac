"""GLIDE layers from files: through train-draft, build-repo and an engine; on ranks; and bad settings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.backend.engine.glide_layers import random_glide
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
from tridecode.backend.engine.host_tier.opening import identity_of
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.draft_files import write_draft
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.evaluate.in_process import repository_engine
from tridecode.tools.train_draft.training import Plan


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A repository with a GLIDE layer, trained a little on the model's own texts."""
    return trained_repository(
        tmp_path_factory.mktemp("glide"), "glide", Plan(3, epochs=4, batch=256, rate=3e-3)
    )


def draft_of(repository: Path) -> Path:
    return repository / "fastertransformer" / "draft"


def test_a_repository_with_a_layer_answers_as_without(repository: Path) -> None:
    assert repository_engine(repository)[1].speculation == "glide"
    assert [one for one in check_repo(repository, checksums=True) if one.severity == "error"] == []
    prompts, params = prompts_of([5, 11, 1, 8], 300), SamplingParams(max_tokens=30)
    plain = generate(loaded(repository, speculation="off"), prompts, params)
    offline = loaded(repository)
    assert [one.tokens for one in generate(offline, prompts, params)] == [one.tokens for one in plain]
    learning = learning_of(offline)
    assert learning.drafted["glide"] > 100
    assert offline.engine.most_drafts == 3, "trained for 3 drafts, max_draft_tokens allows 7"
    assert dict(learning.metrics())['draft_tokens{drafter="glide"}'] == learning.drafted["glide"]
    assert offline.engine.state.trained is None, "the file's tensors are given back"


def test_a_layer_is_in_the_memory_plan(repository: Path) -> None:
    weights, config = repository_engine(repository)
    model, cpu = read_model_config(weights), torch.device("cpu")
    path = str(draft_of(repository))
    with_layer = resolve(replace(config, draft_path=path, **SETTINGS), model, cpu)
    without = replace(with_layer, speculation="off")
    more, plain = (plan_rank(model, one, 0, 0, "cpu") for one in (with_layer, without))
    info = trained_info(with_layer, model)
    assert info is not None
    elements = sum(torch.Size(shape).numel() for shape in info.shapes.values())
    assert more.weights - plain.weights == 4 * elements
    assert more.block - plain.block == plain.block // model.num_layers, "one more layer of the blocks"


def test_the_host_tier_tells_layers_apart(repository: Path, tmp_path: Path) -> None:
    """A file of blocks is not used again with another layer, whose keys and values are in it."""
    weights, config = repository_engine(repository)
    model, draft = read_model_config(weights), tmp_path / "draft"
    shutil.copytree(draft_of(repository), draft)
    config = replace(config, draft_path=str(draft), **SETTINGS)

    def identity(**settings) -> bytes:
        return identity_of(replace(config, **settings), model, Path(weights), 0, torch.device("cpu"))

    first = identity()
    assert first == identity() != identity(speculation="off")
    info = json.loads((draft / "draft.json").read_text())
    (draft / "draft.json").write_text(json.dumps({**info, "digest": "0" * 64}))
    assert identity() != first


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"draft_path": "none"}, "draft_path none; wanted the folder that `tridecode train-draft` wrote"),
        ({"pipeline_para_size": 2}, "with pipeline_para_size 2; wanted 1: only one stage"),
        ({"draft_path": "/nowhere"}, "/nowhere/draft.json: No such file or directory"),
        ({"speculation": "heads"}, "a drafter of kind 'glide'; speculation wants 'heads'"),
    ],
)
def test_settings_that_do_not_fit_are_named(repository: Path, settings: dict, wanted: str) -> None:
    weights, _ = repository_engine(repository)
    config = EngineConfig(**{"speculation": "glide", "draft_path": str(draft_of(repository)), **settings})
    with pytest.raises(ConfigError, match=wanted):
        trained_info(config, read_model_config(weights))


def test_other_rotary_factors_of_long_prompts_are_refused(repository: Path) -> None:
    weights, _ = repository_engine(repository)
    config = EngineConfig(speculation="glide", draft_path=str(draft_of(repository)))
    model = replace(read_model_config(weights), family="phi3")
    assert model.rope is not None
    model = replace(model, rope=replace(model.rope, scaling="longrope"))
    with pytest.raises(ConfigError, match="longrope"):
        trained_info(config, model)


def test_a_layer_of_another_model_is_refused(repository: Path, tmp_path: Path) -> None:
    draft = draft_of(repository)
    for name, shape, wanted in (
        ("gpt2", {}, "has hidden_size"),
        ("llama", {"num_key_value_heads": 1}, "has num_kv_heads 2; layer 1 of the served model has 1"),
        ("llama", {"num_hidden_layers": 1}, "has layer 1; the served model has 0 to 0"),
    ):
        other = save(FAMILIES[name](**shape), tmp_path / f"{name}-{len(shape)}-{sorted(shape)}")
        with pytest.raises(TridecodeError, match=wanted):
            build_repo(other, tmp_path / "repo", draft=draft, dtype="fp32", parity=False, console=QUIET)
        assert not (tmp_path / "repo").exists()


def test_build_repo_refuses_stages(repository: Path, tmp_path: Path) -> None:
    model = save(FAMILIES["llama"](), tmp_path / "hf")
    with pytest.raises(ConfigError, match="speculation = glide does not work with --pp 2; wanted 1"):
        build_repo(
            model, tmp_path / "repo", draft=draft_of(repository), dtype="fp32", parity=False, console=QUIET,
            pipeline_para_size=2,
        )  # fmt: skip


def test_check_repo_finds_what_the_engine_would_refuse(repository: Path, tmp_path: Path) -> None:
    copied = tmp_path / "repo"
    shutil.copytree(repository, copied)
    tensors = draft_of(copied) / "draft.safetensors"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [one for one in check_repo(copied) if one.severity == "error"] == []
    (found,) = [one for one in check_repo(copied, checksums=True) if one.severity == "error"]
    assert "draft.safetensors has the SHA-256" in found.found
    with pytest.raises(TridecodeError, match="draft.safetensors has the SHA-256"):
        loaded(copied)
    (draft_of(copied) / "draft.json").unlink()
    (found,) = [one for one in check_repo(copied) if one.severity == "error"]
    assert "draft.json: No such file" in found.found


def test_random_weights_have_a_random_layer(repository: Path) -> None:
    weights, config = repository_engine(repository)
    config = replace(config, draft_path="none", weights="random", **SETTINGS)
    offline = OfflineEngine.load(weights, config)
    assert offline.engine.most_drafts == 4
    (done,) = generate(offline, prompts_of([5], 300), SamplingParams(max_tokens=8))
    assert len(done.tokens) == 8


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_tensor_ranks_draft_the_same(tmp_path: Path, name: str, sampled: bool) -> None:
    """A width that two ranks cannot divide: their shares of the MLP are padded."""
    model = FAMILIES[name](**{**FAMILIES[name].shared, "vocab_size": 97})
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf"))), "fp32").write(tmp_path / "w")
    trained = random_glide(model, width=45)
    write_draft(tmp_path / "draft", trained.info, trained.tensors)
    prompts = prompts_of([5, 11, 1, 8, 17], 97)
    params = SAMPLED if sampled else SamplingParams(max_tokens=24)
    sizes = {**SIZES, "max_sequence_tokens": 64}
    (plain, _) = on_ranks(tmp_path / "w", 1, 1, lambda one: generate(one, prompts, params), **sizes)
    drafted = {**sizes, "speculation": "glide", "draft_path": str(tmp_path / "draft")}

    def use(offline: OfflineEngine):
        learning_of(offline).policy.costs = None
        drafts, propose = [], offline.engine.drafter.propose

        def propose_and_note(step):
            propose(step)
            drafts.append(step.state.drafts[:, :3].tolist())

        offline.engine.drafter.propose = propose_and_note
        return generate(offline, prompts, params, 2), drafts

    found = {degree: on_ranks(tmp_path / "w", degree, 1, use, **drafted)[0] for degree in (1, 2)}
    for done, _ in found.values():
        for one, other in zip(done, plain, strict=True):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert len(found[1][1]) > 10 and found[1][1] == found[2][1], "the ranks draft what one rank drafts"
