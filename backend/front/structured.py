"""The constraint of an answer: from the fields of a request, and from its tools."""

from __future__ import annotations

from typing import Any, NamedTuple

from tridecode.backend.chat.tools import ToolPlan
from tridecode.backend.front.fields.sampling import Sampled
from tridecode.backend.service.structured_fields import FIELDS, Output, parse_json, read_fields
from tridecode.backend.service.text_tokenizer import TextTokenizer
from tridecode.backend.wire.limits import Limits
from tridecode.backend.wire.structured_output import StructuredOutput


class Constraint(NamedTuple):
    """A constraint of an answer, None for any text, and the field that it comes from."""

    field: str
    output: Output


_NONE = Constraint("", None)


def constraint_of(wanted: Sampled) -> Constraint:
    """Return the constraint of a request's fields. Raises FieldError and UnsupportedField."""
    return Constraint(*read_fields({name: getattr(wanted, name, None) for name in FIELDS}))


def chat_constraint(
    wanted: Sampled, plan: ToolPlan | None, tokenizer: TextTokenizer, limits: Limits, silent: list[str]
) -> Constraint:
    """Return the constraint of a chat. silent: gets the names of fields that have no effect.

    A forced call leaves no room for a response_format. Otherwise the answer is a call or the JSON that the
    request wants. Raises FieldError and UnsupportedField.
    """
    own = constraint_of(wanted)
    if plan is None:
        return own
    if plan.suffix and own.output is not None:
        silent.append(own.field)
        own = _NONE
    if limits.grammar_fault:  # the beginning of a call is forced by the prompt all the same
        if plan.request.strict:
            silent.append("tools.function.strict")
        return own
    if own.output is not None and own.output.kind not in ("json", "json_schema"):
        return own
    ids = {text: tokenizer.tokenizer.token_to_id(text) for text in plan.shown_tokens}
    known = {text: number for text, number in ids.items() if number is not None}
    grammar = plan.grammar(known, None if own.output is None else _schema(own.field, own.output))
    return _NONE if grammar is None else Constraint("tools", StructuredOutput("grammar", grammar))


def _schema(field: str, output: StructuredOutput) -> Any:
    return {"type": "object"} if output.kind == "json" else parse_json(field, output.text)
