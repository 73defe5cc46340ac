"""Events in which only the text changes are those that the whole struct gives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridecode.backend.front.fields.chat import ChatChunk, ChunkChoice, Delta
from tridecode.backend.front.fields.completions import Completion, CompletionChoice
from tridecode.backend.front.text_event import TextEvent


def _chat(name: str, text: str) -> ChatChunk:
    return ChatChunk("chatcmpl-1", 5, name, "fp_1", [ChunkChoice(3, Delta(content=text))])


def _completion(name: str, text: str) -> Completion:
    return Completion("cmpl-1", 5, name, "fp_1", [CompletionChoice(3, text)], None)


@pytest.mark.parametrize("name", ["a model", 'x"\x00"y', "\x00", "東京"])
@given(text=st.text())
def test_a_text_is_put_into_the_event_as_json(name: str, text: str) -> None:
    chat = TextEvent(lambda content: _chat(name, content)).of(text)
    assert chat.startswith(b"data: ") and chat.endswith(b"\n\n") and chat.count(b"\n") == 2
    found = json.loads(chat[6:])
    assert found["choices"] == [
        {"index": 3, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    ]
    assert (found["model"], found["object"]) == (name, "chat.completion.chunk")
    found = json.loads(TextEvent(lambda content: _completion(name, content)).of(text)[6:])
    assert found["choices"] == [{"index": 3, "text": text, "logprobs": None, "finish_reason": None}]
    assert found["model"] == name and found["usage"] is None
