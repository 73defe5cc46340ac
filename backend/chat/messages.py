"""The messages of a chat request: checked, and in the form that chat templates read.

Tool calls get their arguments as objects, developer is system, null content is "", and parts of text become
one text unless the template reads parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tridecode.backend.chat.async_templates import AsyncTemplateRenderer
from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.chat.child_process import RendererDown, TemplateFault
from tridecode.backend.chat.fields import FieldError, UnsupportedField, shown
from tridecode.backend.chat.json_scanner import JsonScanner

MAX_MESSAGES = 16_384
_ROLE = re.compile(r"[A-Za-z0-9_ .-]{1,64}")
_ROLES = {"developer": "system"}
_PROBE = "content-probe-7f3a"
#: keys that reach the template as they are
_PASSED = ("name", "reasoning_content", "reasoning")


async def reads_parts(template: ChatTemplate, renderer: AsyncTemplateRenderer) -> bool:
    """Return whether a template shows the text of content parts. Others show their repr, or fail."""
    message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        text = await template.render_with(renderer, [message])
    except RendererDown:
        raise
    except TemplateFault:
        return False
    return _PROBE in text and not re.search(r"""['"]type['"]""", text)


def template_messages(messages: Sequence[Mapping[str, Any]], parts: bool = False) -> list[dict[str, Any]]:
    """The messages as a template reads them. parts: it reads lists of content parts.

    messages: of JSON's types; keys that are not known here are left out. Raises FieldError, UnsupportedField.
    """
    if not messages:
        raise FieldError("messages", "is an empty list; wanted one message or more")
    if len(messages) > MAX_MESSAGES:
        raise FieldError("messages", f"has {len(messages):,} messages; wanted {MAX_MESSAGES:,} at most")
    open_calls: dict[str, str] = {}  # id -> name of the function
    found = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise FieldError(where, f"is {shown(message)}; wanted a JSON object")
        found.append(_read_message(where, message, parts, open_calls))
    return found


def _read_message(
    where: str, message: Mapping[str, Any], parts: bool, open_calls: dict[str, str]
) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise FieldError(f"{where}.role", f"is {shown(role)}; wanted system, user, assistant or tool")
    if role == "function":
        raise UnsupportedField(f"{where}.role", "is function; wanted tool, with a tool_call_id")
    for key in ("audio", "function_call"):
        if message.get(key) is not None:
            raise UnsupportedField(f"{where}.{key}", "is not implemented; leave it out")
    found: dict[str, Any] = {"role": _ROLES.get(role, role)}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise FieldError(f"{where}.tool_calls", f"is sent by the role {role}; wanted assistant")
    found["content"] = _content(f"{where}.content", message, parts, optional=role == "assistant")
    for key in _PASSED:
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise FieldError(f"{where}.{key}", f"is {shown(value)}; wanted a text")
            found[key] = value
    if calls:
        found["tool_calls"] = _calls(f"{where}.tool_calls", calls, open_calls)
    elif role == "tool":
        number = _answered(f"{where}.tool_call_id", message.get("tool_call_id"), open_calls)
        found["tool_call_id"] = number
        found.setdefault("name", open_calls[number])  # few clients send it, and some templates want it
    return found


def _content(where: str, message: Mapping[str, Any], parts: bool, optional: bool) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if not optional:
            raise FieldError(where, "is missing; wanted a text")
        return ""
    if not isinstance(content, list):
        raise FieldError(where, f"is {shown(content)}; wanted a text or a list of parts")
    texts = [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise FieldError(where, f"is {shown(part)}; wanted a part with type and text")
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "refusal"):
        raise UnsupportedField(where, f"has the type {shown(kind)}; this model reads text")
    if not isinstance(part.get(key), str):
        raise FieldError(f"{where}.{key}", f"is {shown(part.get(key))}; wanted a text")
    return part[key]


def _calls(where: str, calls: Any, open_calls: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise FieldError(where, f"is {shown(calls)}; wanted a list of calls")
    found = []
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise FieldError(place, f"is {shown(call)}; wanted an id, a type and a function")
        if call.get("type", "function") != "function":
            raise UnsupportedField(f"{place}.type", f"is {shown(call.get('type'))}; wanted function")
        name, number = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise FieldError(f"{place}.function.name", f"is {shown(name)}; wanted a text")
        if not isinstance(number, str) or not number:
            raise FieldError(f"{place}.id", f"is {shown(number)}; wanted a text")
        if number in open_calls:
            raise FieldError(f"{place}.id", f"is {shown(number)} twice; wanted each once")
        open_calls[number] = name
        arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
        found.append({"id": number, "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _arguments(where: str, text: Any) -> dict[str, Any]:
    """The arguments as an object: templates write it with tojson."""
    if isinstance(text, Mapping):
        return dict(text)
    if not isinstance(text, str):
        raise FieldError(where, f"is {shown(text)}; wanted a JSON object as a text")
    text = text.strip()
    scanner = JsonScanner()  # with its limit of depth, so that the parser cannot run out of stack
    if text.startswith("{") and scanner.scan(text) == len(text) and scanner.done:
        return json.loads(text)
    if not text:
        return {}
    raise FieldError(where, f"is {shown(text)}; wanted a JSON object as a text")


def _answered(where: str, number: Any, open_calls: dict[str, str]) -> str:
    if not isinstance(number, str) or number not in open_calls:
        found = "missing" if number is None else shown(number)
        raise FieldError(where, f"is {found}; wanted the id of a call in an assistant's message before it")
    return number
