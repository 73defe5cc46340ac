"""Tools and forms of answers for the command line: the files, the prompt, and calls in the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tridecode.backend.base.checkpoint_files import require_file
from tridecode.backend.base.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from tridecode.backend.chat.tool_parser import Arguments, CallStart, Content, Delta
from tridecode.backend.chat.tools import ToolPlan, plan_tools, read_tools
from tridecode.backend.service.structured_fields import GUIDE, GUIDE_TYPE
from tridecode.tools.client.chat import chat_prompt, find_template
from tridecode.tools.client.generate import Piece, TemplatedPrompt

_MAX_FILE_BYTES = 1 << 20


def read_guide(
    schema: Path | None, grammar: Path | None, regex: str | None = None, choice: Sequence[str] = ()
) -> dict[str, str]:
    """Return the inputs for the form of the answer, from one of these; {} without any.

    schema: file of a JSON schema. grammar: file of one in Lark's notation or EBNF. regex: matches the whole
    answer. choice: the answer is one of them. Raises ConfigError.
    """
    values = {"--schema": schema, "--grammar": grammar, "--regex": regex, "--choice": choice or None}
    named = [option for option, value in values.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{named[0]} and {named[1]} are both given; wanted one of them")
    if regex is not None:
        return {GUIDE_TYPE: "regex", GUIDE: regex}
    if choice:
        one_of = " | ".join(json.dumps(text) for text in choice)
        return {GUIDE_TYPE: "ebnf_grammar", GUIDE: f"start: CHOICE\nCHOICE: {one_of}\n"}
    if schema is not None:
        text = _read("--schema", schema)
        _parsed("--schema", schema, text)
        return {GUIDE_TYPE: "json_schema", GUIDE: text}
    return {} if grammar is None else {GUIDE_TYPE: "ebnf_grammar", GUIDE: _read("--grammar", grammar)}


@dataclass(frozen=True)
class ToolChat:
    """A question to a model with tools. inputs: further inputs of the request."""

    prompt: TemplatedPrompt
    plan: ToolPlan
    inputs: dict[str, Any]

    @property
    def stop(self) -> tuple[str, ...]:
        return self.plan.stop

    def shown(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the answer with a line for each call: its function and its arguments."""
        parser, begun, ended = self.plan.parser(), False, False
        for piece in pieces:
            deltas = parser.feed(piece.text)
            if piece.finish_reason:
                deltas, ended = deltas + parser.end(piece.finish_reason == "length"), True
            text, begun = _text_of(deltas, begun)
            yield Piece(text, piece.tokens, piece.finish_reason)
        if not ended:  # a server that tells no finish_reason
            yield Piece(_text_of(parser.end(), begun)[0], 0)


def _text_of(deltas: list[Delta], begun: bool) -> tuple[str, bool]:
    """Return deltas as text, and whether anything was written. begun: something was before."""
    text = ""
    for delta in deltas:
        if isinstance(delta, CallStart):
            text += ("\n" if begun or text else "") + f"{delta.name} "
        elif isinstance(delta, (Content, Arguments)):
            text += delta.text
        else:
            text += f"\n(no call after all: {delta.text})"
    return text, begun or bool(text)


def tool_chat(
    tokenizer_dir: Path, question: str, file: Path, choice: str, template_file: Path | None = None
) -> ToolChat:
    """Return the request of a user's question with the tools of a JSON file.

    choice: auto, required or the name of a function. template_file: replaces the model's chat template.
    Raises CheckpointError and ConfigError.
    """
    tools = _parsed("--tools", file, _read("--tools", file))
    named = {"type": "function", "function": {"name": choice}}
    template = find_template(tokenizer_dir, template_file)
    try:
        request = read_tools(tools, choice if choice in ("auto", "required") else named, None)
        if request is None:
            raise ConfigError(f"--tools {file} has no tools; wanted a list of one or more")
        plan = plan_tools(request, template)
        grammar = plan.grammar(_token_ids(tokenizer_dir, plan))
    except (RequestError, UnsupportedError) as error:
        raise ConfigError(f"--tools {file}: {error}") from None
    inputs: dict[str, Any] = {} if grammar is None else {GUIDE_TYPE: "ebnf_grammar", GUIDE: grammar}
    prompt = chat_prompt(tokenizer_dir, question, plan.schemas, plan.suffix, template_file)
    return ToolChat(prompt, plan, inputs)


def _token_ids(tokenizer_dir: Path, plan: ToolPlan) -> dict[str, int]:
    """Return the ids of the format's tokens. Raises ConfigError for one that the text models do not show."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if not plan.suffix and not plan.kind.bare and plan.kind.tags[0] in special:
        found = f"the special token {plan.kind.tags[0]} opens a call, and text models do not show it"
        raise ConfigError(f"{found}; use --tool-choice required, or tridecode front")
    ids = {text: tokenizer.token_to_id(text) for text in plan.shown_tokens}
    return {text: number for text, number in ids.items() if number is not None}


def _read(option: str, path: Path) -> str:
    try:
        return require_file(path, _MAX_FILE_BYTES).read_text(encoding="utf-8")
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {error}") from None


def _parsed(option: str, path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {path} is not JSON: {error}") from None
