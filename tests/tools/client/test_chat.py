"""Chat templates: transformers' result, limits on an untrusted template, and where one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.tools.client.chat import chat_prompt, find_tokenizer_dir, served_repository

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
    prompt = chat_prompt(tmp_path, " How deep is the harbour? ")
    assert prompt.text == wanted
    bos, wanted_ids = tokenizer.bos_token_id, tokenizer(wanted, add_special_tokens=False).input_ids
    assert ids(prompt.text, add_special_tokens=False).ids == wanted_ids
    if template is WITH_BOS:  # a model without the input add_special_tokens adds a BOS to it
        found = ids(prompt.without_bos).ids
        assert found.count(bos) == 1 and found == wanted_ids
    else:
        assert prompt.without_bos == wanted


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def configure(folder: Path, **settings) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_template_inside_tokenizer_config_is_found_as_transformers_finds_it(folder) -> None:
    configure(folder, chat_template="<{{ messages[0].content }}>")
    assert chat_prompt(folder, "hi").text == "<hi>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    configure(folder, chat_template=named)
    assert chat_prompt(folder, "hi").text == "yes"
    (folder / "chat_template.jinja").write_text("the file")
    assert chat_prompt(folder, "hi").text == "the file"


def test_a_tokenizer_without_a_template_is_told(folder) -> None:
    with pytest.raises(CheckpointError, match="has no chat template"):
        chat_prompt(folder, "hi")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no user may speak') }}", "no user may speak"),
        ("{{ 'a'.ljust(3000000000) }}", "it needs more memory than a template may use"),
        ("{{", "unexpected .end of template"),
    ],
)
def test_a_template_that_fails_is_told_with_its_file(folder, template, found) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=f"chat_template.jinja does not run: {found}"):
        chat_prompt(folder, "hi")


def test_a_template_file_is_limited_before_it_is_read(folder) -> None:
    with open(folder / "chat_template.jinja", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="holds 1,099,511,627,776 bytes; wanted at most"):
        chat_prompt(folder, "hi")


# ---------------------------------------------------------------- where it is found


def test_a_repository_a_folder_and_a_file_all_name_the_tokenizer(folder, tmp_path) -> None:
    place = tmp_path / "repo" / "preprocessing" / "1" / "tokenizer"
    place.mkdir(parents=True)
    (place / "tokenizer.json").write_text("{}")
    for given in (tmp_path / "repo", place, place / "tokenizer.json"):
        assert find_tokenizer_dir(given, "localhost:8001") == place
    with pytest.raises(ConfigError, match="absent has no tokenizer.json"):
        find_tokenizer_dir(tmp_path / "absent", "localhost:8001")


def test_the_repository_of_a_server_on_this_machine_is_found_by_its_port(tmp_path) -> None:
    (tmp_path / "tritonserver").symlink_to(sys.executable)
    program = "import sys; print('up', flush=True); sys.stdin.read()"
    arguments = ["--model-repository=models", "--grpc-port=54321"]
    command = [str(tmp_path / "tritonserver"), "-c", program, *arguments]
    server = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout.readline() == b"up\n"
        assert served_repository("localhost:54321") == tmp_path / "models"
        assert served_repository("127.0.0.1:54322") is None
        assert served_repository("example.com:54321") is None
    finally:
        server.stdin.close()
        server.wait(10)
        server.stdout.close()
    with pytest.raises(ConfigError, match="no tritonserver of this machine serves .*--tokenizer DIR"):
        find_tokenizer_dir(None, "localhost:54321")
