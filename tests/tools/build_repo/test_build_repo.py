"""A repository appears whole, proved and self-consistent, or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.checkpoints import CORE, FAMILIES, greedy, save, tiny_bloom, tiny_gpt2, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.configuration.engine_config import read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.converters import writer
from tridecode.converters.parity import comparison as parity_module
from tridecode.tools.build_repo import build as build_repo_module
from tridecode.tools.build_repo import proof
from tridecode.tools.build_repo.build import _check_end, build_repo
from tridecode.tools.checks.repository import check_repo


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sources")
    return {family: save(FAMILIES[family](), directory / family) for family in CORE}


def everything(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("family", CORE)
def test_a_checkpoint_becomes_a_repository_that_passes_every_check(sources, family, tmp_path):
    repository = build_repo(sources[family], tmp_path / "repo")
    assert repository == tmp_path / "repo"
    assert check_repo(repository, checksums=True) == []
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    engine_dir = str(repository / "fastertransformer")
    engine = read_engine_config(read_engine_parameters(engine_dir), "config.pbtxt")
    assert (engine.tensor_para_size, engine.data_type) == (1, "fp32")
    assert engine.extra["model_type"] == FAMILIES[family].model_type
    weights = Path(checkpoint_dir(engine_dir))
    assert weights == repository / "fastertransformer" / "1" / "1-gpu"
    assert read_model_config(weights).model_name == family
    parity = json.loads((repository / "PARITY.json").read_text())
    assert parity["passed"] and parity["greedy_agreement"] == 1.0
    tokenizer = Tokenizer.from_file(str(repository / "preprocessing/1/tokenizer/tokenizer.json"))
    text = "Größer: 1234 🙂"
    assert tokenizer.encode(text).ids == AutoTokenizer.from_pretrained(sources[family])(text).input_ids


def test_a_repository_can_be_moved(sources, tmp_path):
    build_repo(sources["gpt2"], tmp_path / "here", parity=False)
    moved = shutil.move(tmp_path / "here", tmp_path / "there")
    weights = checkpoint_dir(str(moved / "fastertransformer"))
    assert weights == str(tmp_path / "there" / "fastertransformer" / "1" / "1-gpu")
    model = tiny_gpt2()
    tokens, _ = run_greedy(weights, [[7, 9, 11]], 6)
    assert tokens == [greedy(model, [7, 9, 11], 6)[0]]
    assert not any(str(tmp_path) in path.read_text() for path in moved.rglob("config.pbtxt"))


def test_ranks_stages_dtype_and_settings_reach_the_repository(sources, tmp_path):
    build_repo(
        sources["llama"], tmp_path / "repo", tensor_para_size=2, pipeline_para_size=2, dtype="bf16",
        model_name="my-llama", engine_settings={"max_sequences": 5, "device": "cpu"},
    )  # fmt: skip
    engine_dir = str(tmp_path / "repo" / "fastertransformer")
    engine = read_engine_config(read_engine_parameters(engine_dir), "config.pbtxt")
    assert (engine.tensor_para_size, engine.pipeline_para_size, engine.data_type) == (2, 2, "bf16")
    assert (engine.max_sequences, engine.device) == (5, "cpu")
    weights = Path(checkpoint_dir(engine_dir))
    assert weights.name == "2-gpu"
    config = read_model_config(weights)
    assert (config.model_name, config.weight_dtype) == ("my-llama", "bf16")
    assert (weights / "model.layers.0.attention.query_key_value.weight.1.bin").stat().st_size == 48 * (
        80 // 2
    ) * 2
    assert json.loads((tmp_path / "repo" / "PARITY.json").read_text())["weight_dtype"] == "bf16"
    assert check_repo(tmp_path / "repo", checksums=True) == []


def test_names_follow_the_options(sources, tmp_path):
    build_repo(
        sources["gpt2"], tmp_path / "repo", parity=False, ensemble_owner="tensorrt_llm", plain_text=True
    )
    models = sorted(path.name for path in (tmp_path / "repo").iterdir() if path.is_dir())
    assert models == [
        "ensemble", "ensemble_streaming", "fastertransformer", "fastertransformer_ensemble",
        "fastertransformer_ensemble_streaming", "fastertransformer_streaming", "postprocessing",
        "preprocessing", "tensorrt_llm_bls", "tensorrt_llm_bls_streaming", "tridecode_health",
    ]  # fmt: skip


def test_all_end_ids_are_in_config_ini(sources, tmp_path):
    source = shutil.copytree(sources["llama"], tmp_path / "hf")
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    build_repo(source, tmp_path / "repo", parity=False)
    text = read_engine_parameters(str(tmp_path / "repo" / "tensorrt_llm_bls"))
    assert not text.get("stop_ids")
    config = read_model_config(tmp_path / "repo/fastertransformer/1/1-gpu")
    assert (config.end_id, config.more_end_ids) == (7, (2, 9))


def test_the_dtype_it_chooses_is_said_aloud(sources, tmp_path, monkeypatch):
    said = io.StringIO()
    build_repo(sources["gpt2"], tmp_path / "a", parity=False, console=Console(file=said, width=200))
    assert "dtype: fp32, because this machine has no GPU" in said.getvalue()
    half = save(tiny_gpt2().to(torch.float16), tmp_path / "half")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    build_repo(half, tmp_path / "b", parity=False, console=Console(file=said, width=200))
    assert "dtype: the checkpoint's, because this machine has a GPU" in said.getvalue()
    assert read_model_config(tmp_path / "b/fastertransformer/1/1-gpu").weight_dtype == "fp16"


def test_a_tokenizer_from_elsewhere_is_taken(sources, tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    build_repo(source, tmp_path / "repo", parity=False, tokenizer=sources["llama"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "repo/preprocessing/1/tokenizer/tokenizer.json"))
    assert tokenizer.encode("The").ids[0] == 1  # LLaMA's adds a BOS


# ---------------------------------------------------------------- failures leave nothing


def fail(*args, **kwargs):
    raise OSError("the disk is gone")


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


BREAKS = {
    "while a tensor is written": (writer, "_shard", fail),
    "while the tokenizer is written": (build_repo_module, "save_tokenizer", fail),
    "while the models are written": (build_repo_module, "write_models", fail),
    "in the parity check": (proof, "check_parity", fail),
    "by the user": (proof, "check_parity", interrupt),
}


@pytest.mark.parametrize("moment", BREAKS)
def test_a_run_that_breaks_off_leaves_nothing(sources, tmp_path, moment, monkeypatch):
    module, name, replacement = BREAKS[moment]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises((OSError, KeyboardInterrupt)):
        build_repo(sources["bloom"], tmp_path / "repo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", BREAKS)
def test_a_run_that_breaks_off_leaves_the_old_repository_as_it_was(sources, tmp_path, moment, monkeypatch):
    build_repo(sources["gpt2"], tmp_path / "repo", parity=False)
    before = everything(tmp_path)
    module, name, replacement = BREAKS[moment]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises((OSError, KeyboardInterrupt)):
        build_repo(sources["bloom"], tmp_path / "repo", overwrite=True)
    assert everything(tmp_path) == before


def test_the_old_repository_comes_back_if_the_new_one_cannot_take_its_place(sources, tmp_path, monkeypatch):
    build_repo(sources["gpt2"], tmp_path / "repo", parity=False)
    before = everything(tmp_path)
    rename = Path.rename

    def rename_once(path: Path, target: Path):
        if "building" in path.name:
            raise OSError("no permission")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(OSError, match="no permission"):
        build_repo(sources["bloom"], tmp_path / "repo", overwrite=True, parity=False)
    assert everything(tmp_path) == before


def test_a_model_that_disagrees_with_transformers_is_not_delivered(sources, tmp_path, monkeypatch):
    real = parity_module.run_greedy

    def wrong(*args, **kwargs):
        tokens, logits = real(*args, **kwargs)
        return tokens, [row + 0.5 for row in logits]

    monkeypatch.setattr(parity_module, "run_greedy", wrong)
    with pytest.raises(CheckpointError, match="is not transformers' model of .*: largest logit error 0.5"):
        build_repo(sources["bloom"], tmp_path / "repo")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_left_alone_unless_told(sources, tmp_path):
    build_repo(sources["gpt2"], tmp_path / "repo", parity=False)
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match="repo exists and is not empty; .* or add --overwrite"):
        build_repo(sources["bloom"], tmp_path / "repo", parity=False)
    assert everything(tmp_path) == before
    build_repo(sources["bloom"], tmp_path / "repo", parity=False, overwrite=True)
    assert read_model_config(tmp_path / "repo/fastertransformer/1/1-gpu").family == "bloom"
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


def test_an_empty_output_folder_is_used(sources, tmp_path):
    (tmp_path / "repo").mkdir()
    assert check_repo(build_repo(sources["gpt2"], tmp_path / "repo")) == []


def test_a_folder_that_is_no_repository_is_never_overwritten(sources, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a model repository of this tool; it is not overwritten"):
        build_repo(sources["gpt2"], tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_para_size": 2}, "tensor_para_size = 2 does not divide head_num = 5"),
        ({"pipeline_para_size": 3}, "pipeline_para_size = 3 leaves stages without layers"),
        ({"dtype": "int4"}, "dtype is 'int4'; wanted one of fp32, fp16, bf16"),
        ({"ensemble_owner": "me"}, "ensemble_owner is 'me'"),
        (
            {"engine_settings": {"max_sequnces": 3}},
            "no parameter max_sequnces; did you mean max_sequences\\?",
        ),
        ({"engine_settings": {"memory_fraction": 2}}, "memory_fraction is 2.0; wanted"),
        ({"model_name": "../x"}, "model_name is '../x'; wanted letters"),
        ({"model_name": "x\nhead_num = 7"}, "model_name is .*; wanted letters"),
        ({"model_name": "\udcff"}, "model_name is .*; wanted letters"),
    ],
)
def test_a_wrong_option_is_refused_and_leaves_nothing(tmp_path, options, complaint):
    source = save(tiny_bloom(), tmp_path / "hf")
    with pytest.raises(ConfigError, match=complaint):
        build_repo(source, tmp_path / "repo", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    source = save(tiny_llama(), tmp_path / "hf")
    small = tiny_gpt2()
    small.resize_token_embeddings(300)
    save(small, tmp_path / "small", tokenizer=False)
    with pytest.raises(
        CheckpointError, match="the tokenizer has ids up to 330; the model's vocabulary ends at 299"
    ):
        build_repo(tmp_path / "small", tmp_path / "repo", tokenizer=source, parity=False)
    assert not (tmp_path / "repo").exists()


def test_an_added_token_beyond_the_vocabulary_is_only_warned_of(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf")
    path = source / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(path))
    said = io.StringIO()
    build_repo(source, tmp_path / "repo", console=Console(file=said, width=200))
    assert "the tokenizer adds ids up to 331; the model's vocabulary ends at 330" in said.getvalue()
    findings = check_repo(tmp_path / "repo")
    assert [finding.severity for finding in findings] == ["warning"]
    assert "added ids up to 331" in findings[0].found


# ---------------------------------------------------------------- output


def spoken(sources, tmp_path, name: str = "repo", **options) -> str:
    said = io.StringIO()
    console = Console(file=said, width=60, soft_wrap=True)
    build_repo(sources["gpt2"], tmp_path / name, parity=False, console=console, **options)
    return said.getvalue()


def test_the_last_line_is_the_next_command_to_type(sources, tmp_path):
    for name, quoted in (("repo", "repo"), ("my models", "my models'")):
        last = spoken(sources, tmp_path, name).splitlines()[-1]
        assert re.fullmatch(rf"next: \S*tridecode serve '?{re.escape(str(tmp_path))}/{quoted}", last)


def test_nothing_is_drawn_where_there_is_no_terminal(tmp_path, sources):
    command = [sys.executable, "-m", "tridecode.tools.cli", "build-repo", "--dtype", "fp32"]
    arguments = ["--model", str(sources["gpt2"]), "--output", str(tmp_path / "repo")]
    done = subprocess.run([*command, *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not {b"\r", b"\x1b"} & {bytes([byte]) for byte in done.stdout + done.stderr}
    assert "━" not in (done.stdout + done.stderr).decode() and b"it/s" not in done.stderr


def test_a_folder_whose_name_would_be_settings_becomes_a_plain_model_name(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "x\nhead_num = 7 ; y")
    build_repo(source, tmp_path / "repo", parity=False)
    config = read_model_config(tmp_path / "repo/fastertransformer/1/1-gpu")
    assert (config.model_name, config.num_heads) == ("x-head_num - 7 - y", 3)


# ---------------------------------------------------------------- where it cannot be written


@pytest.mark.parametrize("output", ["file", "file/repo", "file/deep/repo"])
def test_an_output_that_is_or_lies_under_a_file_is_refused_before_any_work(tmp_path, output):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        build_repo(tmp_path / "absent", tmp_path / output)


def test_an_output_on_a_file_system_that_takes_no_folders_is_one_line(sources):
    with pytest.raises(ConfigError, match="/proc/x (cannot be written|needs .* bytes)"):
        build_repo(sources["gpt2"], "/proc/x", parity=False)


def test_a_disk_that_is_too_small_is_told_before_a_byte_is_written(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(1000, 900, 100))
    with pytest.raises(ConfigError, match="repo needs .* bytes for weights; its disk has 100 free"):
        build_repo(sources["gpt2"], tmp_path / "repo")
    assert list(tmp_path.iterdir()) == []


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_fails_while_it_is_written_is_one_line(sources, tmp_path, monkeypatch, number):
    def full(*args, **kwargs):
        raise OSError(number, os.strerror(number), str(tmp_path / "x.bin"))

    monkeypatch.setattr(writer, "_shard", full)
    with pytest.raises(ConfigError, match=f"repo cannot be written: {os.strerror(number)} .*x.bin"):
        build_repo(sources["bloom"], tmp_path / "new" / "deep" / "repo")
    assert list(tmp_path.iterdir()) == []  # the folders above it are gone too


# ---------------------------------------------------------------- a checkpoint that means harm


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; wanted at most 10,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; wanted 1 or more"),
        ({"hidden_size": -48}, "hidden_size|transformers cannot read the config"),
        ({"num_attention_heads": 0}, "num_attention_heads|transformers cannot read the config"),
        ({"vocab_size": 2**62}, "vocab_size = 4611686018427387904; wanted"),
        ({"hidden_size": float("nan")}, "hidden_size|transformers cannot read the config"),
        ({"rms_norm_eps": float("nan")}, "norm_eps = nan; wanted a finite number"),
        ({"rms_norm_eps": "1e-5"}, "norm_eps|transformers cannot read the config"),
        ({"vocab_size": 10**9}, "the config wants"),
    ],
)
def test_sizes_of_a_config_are_limited_before_anything_is_made_of_them(tmp_path, change, told):
    source = save(tiny_llama(), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    started = time.process_time()
    with pytest.raises((CheckpointError, ConfigError), match=told) as caught:
        build_repo(source, tmp_path / "repo")
    assert time.process_time() - started < 10 and "\n" not in str(caught.value)
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(("end_ids", "warned"), [([2], False), ([5, 2], False), ([5, 7], True), ([], False)])
def test_an_eos_token_that_does_not_end_texts_is_warned_of(capsys, end_ids, warned) -> None:
    tokenizer = tiny_tokenizer()
    token = tokenizer.convert_ids_to_tokens(2)
    _check_end(tokenizer.backend_tokenizer, token, end_ids, Console(width=300))
    said = capsys.readouterr().out
    wanted = f"the tokenizer's eos_token is {token!r}, id 2; texts end at 5, 7 (generation_config.json"
    assert (wanted in said) == warned and bool(said) == warned
