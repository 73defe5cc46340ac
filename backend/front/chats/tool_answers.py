"""Tool calls of an answer in OpenAI's shapes: of a message, and of the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from tridecode.backend.chat.tool_parser import (
    Arguments,
    CallBroken,
    CallStart,
    Content,
    Delta,
    ToolCallParser,
)
from tridecode.backend.front.fields import chat as fields


def message_of(parser: ToolCallParser, text: str, finish_reason: str) -> fields.AnswerMessage:
    """Return the message of a whole text. A call that turned out to be none is part of the content."""
    calls: dict[int, fields.ToolCall] = {}
    content = ""
    for delta in [*parser.feed(text), *parser.end(finish_reason == "length")]:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, CallStart):
            calls[delta.call] = fields.ToolCall(delta.id, fields.FunctionCall(delta.name, ""))
        elif isinstance(delta, Arguments):
            calls[delta.call].function.arguments += delta.text
        else:
            del calls[delta.call]
            content += delta.text
    if not calls:
        return fields.AnswerMessage(content)
    return fields.AnswerMessage(content or None, tool_calls=list(calls.values()))


def chunks_of(deltas: Sequence[Delta]) -> list[fields.Delta]:
    """Return the deltas of a stream's chunks: neighbours of a kind are one, content and calls are apart."""
    chunks: list[fields.Delta] = []
    for delta in deltas:
        last = chunks[-1] if chunks else fields.Delta()
        if isinstance(delta, (Content, CallBroken)):
            if isinstance(last.content, str):
                last.content += delta.text
            else:
                chunks.append(fields.Delta(content=delta.text))
            continue
        if not isinstance(last.tool_calls, list):
            last = fields.Delta(tool_calls=[])
            chunks.append(last)
        calls = last.tool_calls
        assert isinstance(calls, list)
        if isinstance(delta, CallStart):
            function = fields.FunctionDelta(delta.name, "")
            calls.append(fields.ToolCallDelta(delta.call, function, delta.id, "function"))
        elif calls and calls[-1].index == delta.call:
            function = calls[-1].function
            assert isinstance(function.arguments, str)
            function.arguments += delta.text
        else:
            calls.append(fields.ToolCallDelta(delta.call, fields.FunctionDelta(arguments=delta.text)))
    return chunks
