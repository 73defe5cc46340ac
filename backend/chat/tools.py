"""Checks the tools of a chat request, and prepares their rendering and the parsing of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.chat.fields import FieldError, UnsupportedField, shown
from tridecode.backend.chat.tool_formats import ToolFormat, find_format
from tridecode.backend.chat.tool_grammar import ANY_OBJECT, CallGrammar, object_schema
from tridecode.backend.chat.tool_parser import ToolCallParser

MAX_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
_TOOLS_VARIABLE = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request. schemas: as the template sees them. choice: "auto", "required" or "named".
    named: the function that must be called; "": any. parallel: an answer may have several calls.
    strict: functions whose arguments have to follow their schema wherever they are called. allowed: the
    functions that may be called; None: all.
    """

    schemas: list[dict[str, Any]]
    choice: str = "auto"
    named: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Return the functions that the answer may call."""
        return frozenset(self.parameters)

    @property
    def parameters(self) -> dict[str, dict[str, Any] | None]:
        """Return the schema of the arguments of each function that the answer may call."""
        functions = [schema["function"] for schema in self.schemas]
        found = {function["name"]: function.get("parameters") for function in functions}
        names = {self.named} if self.named else self.allowed
        return {name: schema for name, schema in found.items() if names is None or name in names}


@dataclass(frozen=True)
class ToolPlan:
    """The handling of a request with tools.

    schemas: the template's variable `tools`. suffix: text after the rendered prompt, which the answer
    continues. shown_tokens: special tokens that the text of the answer must show. stop: stop words in
    addition to the client's.
    """

    request: ToolRequest
    kind: ToolFormat
    suffix: str

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return self.request.schemas

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        return self.kind.shown_tokens

    @property
    def stop(self) -> tuple[str, ...]:
        return () if self.request.parallel or not self.kind.stop else (self.kind.stop,)

    def grammar(self, ids: Mapping[str, int], response: Any = None) -> str | None:
        """Return the grammar of the answer, None if it may be any text.

        ids: of those shown_tokens that are one token. response: a JSON schema that the answer follows unless
        it calls functions. Raises FieldError for a schema of arguments that cannot be objects.
        """
        request = self.request
        if not (self.suffix or request.strict or response is not None):
            return None
        schemas = {
            name: object_schema(schema) if self.suffix or name in request.strict else ANY_OBJECT
            for name, schema in request.parameters.items()
        }
        for name, schema in schemas.items():
            if schema["type"] != "object":
                index = [one["function"]["name"] for one in request.schemas].index(name)
                where = f"tools[{index}].function.parameters.type"
                raise FieldError(where, f'is {shown(schema["type"])}; wanted "object"')
        calls = CallGrammar(self.kind, schemas, ids, single=not request.parallel)
        if self.suffix:
            return calls.forced(request.named or None)
        return calls.free() if response is None else calls.or_response(response)

    def parser(self) -> ToolCallParser:
        """Return a parser for one answer."""
        request, kind = self.request, self.kind
        return ToolCallParser(
            kind, request.names, kind.new_id, forced=self.suffix, single=not request.parallel
        )


def read_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> ToolRequest | None:
    """Return the tools of a request; None if it has none or forbids calls. Values have JSON's types, None for
    a field that was not sent. Raises FieldError and UnsupportedField.
    """
    if parallel_tool_calls not in (None, True, False):
        raise FieldError("parallel_tool_calls", f"is {shown(parallel_tool_calls)}; wanted true or false")
    if tools is None or tools == []:
        if tool_choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", f"is {shown(tool_choice)} and there are no tools; wanted tools")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise FieldError("tools", f"is {shown(tools)}; wanted a list of at most {MAX_TOOLS} tools")
    schemas = [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = [schema["function"]["name"] for schema in schemas]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FieldError(f"tools[{index}].function.name", f"is {shown(name)} twice; wanted each once")
    allowed = None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        tool_choice, allowed = _read_allowed(tool_choice.get("allowed_tools"), names)
    choice, named = _read_choice(tool_choice, names)
    if choice == "none":
        return None
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    # a named function is called once, as with OpenAI
    parallel = parallel_tool_calls is not False and not named
    return ToolRequest(schemas, choice, named, parallel, strict, allowed)


def _read_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise FieldError(where, f"is {shown(tool)}; wanted a JSON object")
    if tool.get("type") != "function":
        raise UnsupportedField(f"{where}.type", f"is {shown(tool.get('type'))}; wanted function")
    function = tool.get("function")
    where += ".function"
    if not isinstance(function, Mapping):
        raise FieldError(where, f"is {shown(function)}; wanted a JSON object")
    unknown = sorted(set(function) - _FUNCTION_KEYS)
    if unknown:
        raise FieldError(where, f"has the unknown field {shown(unknown[0])}; wanted {_names(_FUNCTION_KEYS)}")
    _check_name(f"{where}.name", function.get("name"))
    for key, kind, words in (
        ("description", str, "a text"),
        ("parameters", Mapping, "a JSON object (a JSON schema)"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise FieldError(f"{where}.{key}", f"is {shown(value)}; wanted {words}")
    kept = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return {"type": "function", "function": kept}


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found = "missing" if name is None else f"{shown(name)}"
        raise FieldError(where, f"is {found}; wanted 1 to 128 letters, digits, _, - and .")


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _read_choice(choice: Any, names: Sequence[str]) -> tuple[str, str]:
    """Return none, auto, required or named, and the function's name."""
    if choice is None:
        return "auto", ""
    if choice in ("none", "auto", "required"):
        return choice, ""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "named", _known_name("tool_choice", choice, names)
    if isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
        text = f"is {shown(choice['type'])}; wanted function or allowed_tools"
        raise UnsupportedField("tool_choice.type", text)
    raise FieldError("tool_choice", f"is {shown(choice)}; wanted none, auto, required or a function of tools")


def _read_allowed(value: Any, names: Sequence[str]) -> tuple[str, frozenset[str]]:
    """Return the mode and the functions of a tool_choice of the type allowed_tools."""
    where = "tool_choice.allowed_tools"
    if not isinstance(value, Mapping):
        raise FieldError(where, f"is {shown(value)}; wanted a JSON object with mode and tools")
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise FieldError(f"{where}.mode", f"is {shown(mode)}; wanted auto or required")
    if not isinstance(tools, list) or not tools:
        raise FieldError(f"{where}.tools", f"is {shown(tools)}; wanted a list of functions")
    allowed = [_known_name(f"{where}.tools[{index}]", tool, names) for index, tool in enumerate(tools)]
    return mode, frozenset(allowed)


def _known_name(where: str, choice: Any, names: Sequence[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}, which must be one of tools."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        known = ", ".join(names[:8])
        raise FieldError(f"{where}.function.name", f"is {shown(name)}; wanted one of tools: {known}")
    return name


def plan_tools(request: ToolRequest, template: ChatTemplate, parser: str | None = None) -> ToolPlan:
    """Return the handling for a model with this template. parser: the format's name, if an operator sets it.

    Raises UnsupportedField if the template does not show tools, or if its format of calls is unknown.
    """
    source = template.source_for(request.schemas)
    if not _TOOLS_VARIABLE.search(source):
        text = f"is sent, and the chat template ({template.path.name}) does not show tools"
        text += "; start with another --chat-template"
        raise UnsupportedField("tools", text)
    kind = find_format(source, parser)
    if kind is None:
        text = "is sent, and the model's chat template has no known format of calls; see --tool-call-parser"
        raise UnsupportedField("tools", text)
    suffix = "" if request.choice == "auto" else kind.forced(request.named or None)
    return ToolPlan(request, kind, suffix)
