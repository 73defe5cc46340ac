"""A draft model is converted with its target into one repository, or refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.backend.engine.test_lookup import learning_of
from tests.checkpoints import FAMILIES, greedy, save
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.configuration.engine_config import read_engine_config, with_folders
from tridecode.backend.configuration.engine_config_file import (
    checkpoint_dir,
    read_engine_parameters,
    tokenizer_dir,
)
from tridecode.backend.engine.device.drafters.draft_loading import check_draft_tokenizer
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.doctor.fit import Place, fit
from tridecode.tools.doctor.repository import read_engines

PROMPT = [7, 9, 11]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: save(FAMILIES[name](), folder / name) for name in ("llama", "gpt2")}


def build(model: Path, output: Path, draft: Path, **options) -> Path:
    console = Console(file=io.StringIO())
    return build_repo(model, output, draft=draft, dtype="fp32", parity=False, console=console, **options)


@pytest.mark.parametrize("from_repository", [False, True])
def test_the_draft_model_of_another_family_is_served_with_its_target(sources, tmp_path, from_repository):
    draft = sources["gpt2"]
    if from_repository:
        draft = build_repo(draft, tmp_path / "small", dtype="fp32", parity=False, console=Console(quiet=True))
    repository = build(sources["llama"], tmp_path / "repo", draft)
    assert [
        finding for finding in check_repo(repository, checksums=True) if finding.severity == "error"
    ] == []
    engine = repository / "fastertransformer"
    config = read_engine_config(read_engine_parameters(str(engine)), "config.pbtxt")
    assert (config.speculation, config.draft_path) == ("draft", "draft")
    config = with_folders(config, engine)
    check_draft_tokenizer(config, tokenizer_dir(engine))
    offline = OfflineEngine.load(checkpoint_dir(str(engine)), config)
    learning_of(offline).policy.costs = None
    (done,) = offline.generate([PROMPT], SamplingParams(max_tokens=12, end_id=-1))
    assert done.tokens == greedy(FAMILIES["llama"](), PROMPT, 12)[0]
    assert learning_of(offline).drafted["draft"] > 5
    with pytest.raises(ConfigError, match="draft/tokenizer.json is not a valid tokenizer"):
        (engine / "draft" / "tokenizer.json").write_text("{")
        check_draft_tokenizer(config, tokenizer_dir(engine))


def test_check_and_doctor_find_what_the_engine_would_refuse(sources, tmp_path) -> None:
    repository = build(sources["llama"], tmp_path / "repo", sources["gpt2"])
    (engine,) = read_engines(repository)
    assert fit(engine.model, engine.config, Place("cpu", 4 << 30)).fits
    folder = repository / "fastertransformer" / "draft"
    weight = next(folder.glob("*.bin"))
    data = weight.read_bytes()
    weight.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (found,) = [one for one in check_repo(repository, checksums=True) if one.severity == "error"]
    assert weight.name in found.found and found.where == str(folder)
    (folder / "tokenizer.json").unlink()
    (found,) = [one for one in check_repo(repository) if one.severity == "error"]
    assert "draft has no tokenizer.json" in found.found
    (folder / "config.ini").unlink()
    (found,) = [one for one in check_repo(repository) if one.severity == "error"]
    assert "draft, which has no config.ini" in found.found


def test_settings_may_leave_the_draft_model_off(sources, tmp_path) -> None:
    repository = build(
        sources["llama"], tmp_path / "repo", sources["gpt2"], engine_settings={"speculation": "off"}
    )
    parameters = read_engine_parameters(str(repository / "fastertransformer"))
    assert (parameters["speculation"], parameters["draft_path"]) == ("off", "draft")
    assert (repository / "fastertransformer" / "draft" / "config.ini").is_file()


def _another_vocabulary(folder: Path) -> Path:
    return save(FAMILIES["gpt2"](vocab_size=340), folder)


def _another_tokenizer(folder: Path) -> Path:
    save(FAMILIES["gpt2"](), folder)
    file = folder / "tokenizer.json"
    facts = json.loads(file.read_text())
    facts["added_tokens"][0]["content"] = "<|other|>"
    facts["model"]["vocab"]["<|other|>"] = facts["model"]["vocab"].pop("<|endoftext|>")
    file.write_text(json.dumps(facts))
    return folder


def _no_tokenizer(folder: Path) -> Path:
    return save(FAMILIES["gpt2"](), folder, tokenizer=False)


def _no_weights(folder: Path) -> Path:
    save(FAMILIES["gpt2"](), folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_another_vocabulary, "has 340 token ids; wanted those of the model, 331"),
        (_another_tokenizer, r"has another tokenizer than the model: found id 0 = '<\|other\|>'"),
        (_no_tokenizer, "has no tokenizer; wanted that of the model"),
        (_no_weights, "safetensors"),
    ],
)
def test_a_draft_model_that_does_not_fit_leaves_nothing(sources, tmp_path, make, text: str) -> None:
    draft = make(tmp_path / "draft")
    with pytest.raises(CheckpointError, match=text):
        build(sources["llama"], tmp_path / "repo", draft)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"speculation": "heads"},
            "is heads; wanted draft, lookup.draft, lookup or off, because .* a draft model",
        ),
        ({"speculation": "lookup+glide"}, r"is lookup\+glide; wanted draft"),
        ({"draft_path": "nowhere"}, "draft_path is nowhere; wanted none, because --draft writes it"),
    ],
)
def test_a_setting_of_another_drafter_is_refused_before_the_conversion(
    sources, tmp_path, settings, text
) -> None:
    with pytest.raises(ConfigError, match=text):
        build(sources["llama"], tmp_path / "repo", sources["gpt2"], engine_settings=settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("speculation", ["draft", "lookup+heads"])
def test_a_drafter_without_its_files_is_refused_before_the_conversion(sources, tmp_path, speculation) -> None:
    output = io.StringIO()
    with pytest.raises(ConfigError, match=r"speculation is \S+; wanted --draft with the drafter"):
        build_repo(
            sources["llama"], tmp_path / "repo", dtype="fp32", parity=False, console=Console(file=output),
            engine_settings={"speculation": speculation},
        )  # fmt: skip
    assert "writing" not in output.getvalue()
