"""Arguments of build-repo: a wrong one is refused before torch is imported; `--for`; groups of the help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tridecode.backend.base.errors import ConfigError
from tridecode.model_repo_templates.repository import repository_models
from tridecode.model_repo_templates.served import DEFAULT, PRESETS
from tridecode.tools.build_repo.options import contracts_of
from tridecode.tools.cli import app

CPU_S = 1.5
HEAVY = ("torch", "transformers", "matplotlib")
BUILD = ("build-repo", "--model", "m", "--output", "repo")
REFUSED = [
    ((*BUILD, "--contract", "openai"), "there is no contract 'openai'"),
    ((*BUILD, "--owner", "vllm"), "owner is 'vllm'"),
    ((*BUILD, "--for", "openai"), "--for openai: wanted one of fastertransformer, trtllm, vllm"),
    ((*BUILD, "--for", "vllm", "--contract", "vllm"), "leave --contract out"),
    ((*BUILD, "--set", "max_sequnces=3"), "did you mean max_sequences?"),
    ((*BUILD, "--set", "max_sequences=none"), "max_sequences"),
    ((*BUILD, "--dtype", "fp64"), "dtype is 'fp64'; wanted one of"),
    ((*BUILD, "--quantize", "int3"), "--quantize int3: wanted one of"),
    ((*BUILD, "--quantize-floor", "1"), "--quantize-floor 1: wanted"),
    ((*BUILD, "--calibrate", "absent.jsonl", "--quantize", "int4-awq"), "absent.jsonl cannot be read"),
    ((*BUILD, "--parity-text", "absent.jsonl"), "absent.jsonl cannot be read"),
    ((*BUILD, "--tokenizer", "absent"), "--tokenizer absent: no such file or folder"),
    ((*BUILD, "--lora", "absent"), "--lora absent: no such file or folder"),
    ((*BUILD, "--prompts", "absent"), "--prompts absent: no such file or folder"),
    (("build-repo", "--model", "./m", "--output", "repo"), "m: no such file or folder"),
    ((*BUILD[:2], ".", "--output", "repo", "--reference", "a/b/c"), "a/b/c: no such file or folder"),
    (("build-repo", "--model", "m", "--output", "file"), "file is not a folder"),
    (("demo", "--model", "./m"), "m: no such file or folder"),
    (("check", "absent"), "absent: found no directory; wanted a model repository"),
    (("doctor", "--gpu-memory", "much"), "--gpu-memory is 'much'"),
    (("adapters", "list", "absent"), "absent/fastertransformer/config.pbtxt cannot be read"),
    (("evaluate-lambada", "--data", "absent"), "absent cannot be read"),
    (("evaluate-lambada", "--data", "absent", "--definition", "x"), "--definition x: wanted"),
    (("serve", "absent"), "'absent' is not a file or folder, and the hub could not be reached"),
    (("bench", "engine", "--preset", "gpt5"), "no preset 'gpt5'"),
]


@pytest.mark.parametrize(
    ("arguments", "told"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_refusal_costs_little_and_imports_no_torch(arguments, told, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code = f"""
import sys, tridecode.tools.cli as cli
try:
    cli.app({list(arguments)!r})
finally:
    print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    spent = []
    while len(spent) < 2 and (not spent or spent[0] >= CPU_S):  # the first one may write byte code
        before = os.times()  # seconds of a processor, which other processes do not lengthen
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        after = os.times()
        spent.append(sum(after[2:4]) - sum(before[2:4]))
    assert done.returncode in (1, 2) and told in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
    assert min(spent) < CPU_S
    assert os.listdir(tmp_path) == ["file"]


# ---------------------------------------------------------------- --for

#: models that the clients of each server call, from shared client contracts: docs/guides/clients.md
CALLED = {
    "fastertransformer": {"fastertransformer", "preprocessing", "postprocessing", "ensemble"},
    "trtllm": {"ensemble", "tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing"},
    "vllm": {"vllm_model", "ensemble"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_for_makes_the_models_that_these_clients_call(preset) -> None:
    contracts, owner = contracts_of(preset, [], "")
    models = {model.name: model for model in repository_models(owner, contracts=contracts)}
    assert CALLED[preset] <= set(models)
    text = preset != "fastertransformer"  # text_input and text_output, not INPUT_0
    assert models["ensemble"].template == ("text" if text else "ensemble")


def test_for_excludes_what_it_sets_and_the_default_stays() -> None:
    assert contracts_of(None, [], "") == (list(DEFAULT), "")
    assert contracts_of(None, ["vllm"], "") == (["vllm"], "")
    with pytest.raises(ConfigError, match="leave --ensemble-owner out"):
        contracts_of("trtllm", [], "tensorrt_llm")


# ---------------------------------------------------------------- help


def test_the_help_of_build_repo_has_groups_that_hold_every_option_once() -> None:
    done = CliRunner().invoke(app, ["build-repo", "--help"])
    titles = re.findall(r"^(\S.*):$", done.output, re.MULTILINE)
    assert titles == [
        *("Options", "Contracts and models", "The source", "Comparison with the source", "Quantisation"),
    ]
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", done.output, re.MULTILINE)
    command = typer.main.get_command(app).commands["build-repo"]
    assert sorted(listed) == sorted(["--help", *(param.opts[0] for param in command.params)])
    assert listed.index("--model") < listed.index("--overwrite") < listed.index("--for")
    assert listed.index("--quantize") > listed.index("--contract")


def test_for_is_printed_with_what_it_sets(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["build-repo", "--model", str(tmp_path), "--output", str(tmp_path / "repo"), "--for", "trtllm"],
    )
    assert done.stdout.splitlines()[0] == (
        "--for trtllm: --contract tensorrt_llm,tensorrt_llm_tokens --ensemble-owner tensorrt_llm"
    )
