"""The demonstration: the right prompt, a cache that is used and renewed, and one run from end to end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama, tiny_tokenizer
from tridecode.backend.errors import CheckpointError
from tridecode.tools import demo
from tridecode.tools.build_repo import build_repo
from tridecode.tools.cli import app

ROOT = Path(__file__).parents[2]
CHATML = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
WITH_BOS = """{{ bos_token }}{% for message in messages %}
  {% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.mark.parametrize("template", [CHATML, WITH_BOS])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_prompt_is_what_transformers_makes_of_the_chat_template(tmp_path, template, adds_bos) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": " How deep is the harbour? "}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode
    asked = demo.chat_prompt(tmp_path, " How deep is the harbour? ")
    bos = tokenizer.bos_token_id
    if template is WITH_BOS:
        found = ids(asked).ids
        assert found.count(bos) == 1 and found[0] == bos
        assert found == tokenizer(wanted, add_special_tokens=False).input_ids
    else:
        assert asked == wanted


def test_a_model_without_a_chat_template_gets_the_prompt_as_it_is(tmp_path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert demo.chat_prompt(tmp_path, "The history of") == "The history of"


def test_a_template_that_does_not_run_is_named(tmp_path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no user may speak') }}")
    with pytest.raises(CheckpointError, match="chat_template.jinja.*no user may speak"):
        demo.chat_prompt(tmp_path, "hello")


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    code = "import sys; from tridecode.tools import demo; print(demo.packaged_model(), 'llm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, imported = done.stdout.rsplit(maxsplit=1)
    assert imported == "False"
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"


def test_the_repository_is_made_once_and_again_when_the_model_changes(tmp_path, monkeypatch) -> None:
    built = []

    def build(model: str, output: Path) -> None:
        built.append(output)
        output.mkdir()

    monkeypatch.setattr(demo, "build_repo", build)
    model, cache = tmp_path / "My Model 1.5B", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")
    other = cache / "my-model-1-5b-instruct-0123456789ab"
    other.mkdir(parents=True)
    first = demo.demo_repository(str(model), cache)
    assert demo.demo_repository(str(model), cache) == first and built == [first]
    (model / "config.json").write_text('{"hidden_size": 8}')
    second = demo.demo_repository(str(model), cache)
    assert built == [first, second] and second != first
    assert sorted(cache.iterdir()) == sorted([other, second])  # what the change made stale is gone
    assert second.name.startswith("my-model-1-5b-")


def test_an_answer_is_not_asked_to_be_longer_than_the_models_positions(tmp_path) -> None:
    checkpoint = save(tiny_llama(max_position_embeddings=32), tmp_path / "tiny")
    repository = build_repo(str(checkpoint), tmp_path / "repo", parity=False)
    tokens = len(tiny_tokenizer(adds_bos=True)("The history").input_ids)
    assert demo.room_after("The history", repository) == 32 - tokens > 1
    assert demo.room_after("The history " * 50, repository) == 1  # the server says how long is too long


@pytest.mark.server
def test_the_demonstration_streams_an_answer_and_leaves_nothing_running(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    arguments = ["demo", "--model", str(checkpoint), "--prompt", "The history of", "--max-tokens", "5"]
    first, second = CliRunner().invoke(app, arguments), CliRunner().invoke(app, arguments)
    for done in (first, second):
        assert done.exit_code == 0, done.output
        assert re.search(r"first token \d+ ms.*; 5 tokens", done.stderr)
        assert re.search(r"to serve it: .* serve demo/tiny-", done.stderr)
    assert "(made before)" in second.stderr and "(made before)" not in first.stderr
    assert len(second.stdout.strip()) > 0 and first.stdout.endswith(second.stdout)
    log = (tmp_path / "demo" / "serve.log").read_text()
    assert "stopped" in log.splitlines()[-1]


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = set(re.findall(r"^  make (\S+) ", done.stdout, re.MULTILINE))
    assert set(phony.group(1).split()) == listed


def test_make_says_which_python_it_wants(tmp_path) -> None:
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", "PYTHON="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no Python 3.10, 3.11 or 3.12" in done.stdout
