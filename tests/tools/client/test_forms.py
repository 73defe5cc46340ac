"""`tridecode generate` with tools and forms of answers, before a server of Triton's protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.backend.chat import tool_templates
from tests.checkpoints import tiny_tokenizer
from tests.tools.fake_server import FakeModel, fake_server, text_responses
from tridecode.tools.cli import app

TOOLS = [
    {
        "type": "function",
        "function": {"name": "depth", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
]
CALL = '<tool_call>\n{"name": "depth", "arguments": {"at": "Bergen"}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tool_templates.HERMES
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return tmp_path


def text_model(*pieces: str) -> FakeModel:
    return FakeModel("tensorrt_llm_bls", ("text_input",), text_responses([(piece, 1) for piece in pieces]))


def sent(server) -> dict[str, str]:
    """The texts of the last request."""
    request = server.requests[-1]
    return {
        tensor.name: request.raw_input_contents[index][4:].decode()
        for index, tensor in enumerate(request.inputs)
        if tensor.datatype == "BYTES"
    }


def run(server, folder: Path, *arguments: str):
    command = ["generate", "-p", "How deep?", "-u", server.url, "--tokenizer", str(folder / "tokenizer")]
    return CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "400"})


@pytest.mark.parametrize("cut", [1, 7, 500])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_calls_are_shown_as_lines(folder: Path, cut: int, stream: str) -> None:
    text = f"Let me see. {CALL}\n{CALL}"
    model = text_model(*(text[i : i + cut] for i in range(0, len(text), cut)))
    with fake_server(model) as server:
        result = run(server, folder, "--tools", str(folder / "tools.json"), stream)
        wanted = tiny_tokenizer().apply_chat_template(
            [{"role": "user", "content": "How deep?"}],
            tools=TOOLS,
            chat_template=tool_templates.HERMES,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert sent(server) == {"text_input": wanted}
    assert result.exit_code == 0, result.output
    line = 'depth {"at": "Bergen"}'
    assert result.stdout == f"Let me see.\n{line}\n{line}\n"


def test_a_forced_call_continues_the_prompt_and_has_a_grammar(folder: Path) -> None:
    start = '<tool_call>\n{"name": "depth", "arguments":'
    with fake_server(text_model(CALL[len(start) :])) as server:
        result = run(server, folder, "--tools", str(folder / "tools.json"), "--tool-choice", "depth")
        found = sent(server)
    assert result.stdout == 'depth {"at": "Bergen"}\n'
    assert found["text_input"].endswith(f"<|im_start|>assistant\n{start}")
    assert found["guided_decoding_guide_type"] == "ebnf_grammar"
    assert found["guided_decoding_guide"].startswith("%llguidance")


def test_another_template_shows_the_tools_of_a_model_without_one(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "hermes.jinja").write_text(tool_templates.HERMES)
    tools = ("--tools", str(folder / "tools.json"), "--tool-choice", "required")
    with fake_server(text_model(CALL.removeprefix('<tool_call>\n{"name": "'))) as server:
        refused = run(server, folder, *tools)
        assert (
            refused.exit_code and "does not show tools; start with another --chat-template" in refused.output
        )
        assert not server.requests
        result = run(server, folder, *tools, "--chat-template", str(folder / "hermes.jinja"))
        assert result.exit_code == 0 and 'depth {"at": "Bergen"}' in result.stdout
        assert "<tools>" in sent(server)["text_input"]
        missing = run(server, folder, *tools, "--chat-template", str(folder / "none.jinja"))
        assert missing.exit_code and "none.jinja" in missing.output


def test_a_schema_and_a_grammar_travel_as_guides(folder: Path) -> None:
    (folder / "schema.json").write_text('{"type": "object"}')
    (folder / "grammar.lark").write_text('start: "港"\n')
    with fake_server(text_model("{}")) as server:
        for option, file, kind in (
            ("--schema", "schema.json", "json_schema"),
            ("--grammar", "grammar.lark", "ebnf_grammar"),
        ):
            result = run(server, folder, "--chat", option, str(folder / file))
            assert result.exit_code == 0, result.output
            found = sent(server)
            assert found["guided_decoding_guide_type"] == kind
            assert found["guided_decoding_guide"] == (folder / file).read_text()


def test_an_expression_and_choices_travel_as_guides(folder: Path) -> None:
    with fake_server(text_model("yes")) as server:
        assert run(server, folder, "--chat", "--regex", "[0-9]+ m").exit_code == 0
        found = sent(server)
        assert (found["guided_decoding_guide_type"], found["guided_decoding_guide"]) == ("regex", "[0-9]+ m")
        assert run(server, folder, "--chat", "--choice", "yes", "--choice", 'n"o').exit_code == 0
        found = sent(server)
        assert found["guided_decoding_guide_type"] == "ebnf_grammar"
        assert found["guided_decoding_guide"] == 'start: CHOICE\nCHOICE: "yes" | "n\\"o"\n'


#: arguments -> part of the error
BAD = {
    ("--tools", "absent.json"): "--tools: .*absent.json cannot be read",
    ("--tools", "bad.json"): "bad.json is not JSON",
    ("--tools", "empty.json"): "has no tools; wanted a list of one or more",
    ("--tools", "tools.json", "--tool-choice", "tide"): 'function.name is "tide"; wanted one of tools: depth',
    ("--tools", "tools.json", "--schema", "tools.json"): "wanted one of them",
    ("--chat", "--schema", "bad.json"): "bad.json is not JSON",
    ("--chat", "--regex", "a", "--choice", "b"): "--regex and --choice are both given; wanted one of them",
    ("--chat", "--schema", "tools.json", "--grammar", "tools.json"): "wanted one of them",
}


@pytest.mark.parametrize("arguments", BAD)
def test_wrong_files_are_named(folder: Path, arguments: tuple[str, ...], monkeypatch) -> None:
    (folder / "bad.json").write_text("[1,")
    (folder / "empty.json").write_text("[]")
    monkeypatch.chdir(folder)
    with fake_server(text_model("x")) as server:
        result = run(server, folder, *arguments)
        assert not server.requests
    assert result.exit_code != 0
    message = " ".join(result.output.split())

    assert re.search(BAD[arguments], message), message


def test_a_special_token_that_text_models_do_not_show_is_named(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    tokenizer.chat_template = tool_templates.HERMES
    tokenizer.save_pretrained(folder / "tokenizer")
    with fake_server(text_model("x")) as server:
        result = run(server, folder, "--tools", str(folder / "tools.json"))
        assert not server.requests
    assert "the special token <tool_call> opens a call" in " ".join(result.output.split())
