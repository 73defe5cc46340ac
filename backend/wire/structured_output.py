"""The structured output of a request: the schema, regular expression or grammar that its answer obeys.

Doors and engine share these definitions. Nothing here parses a grammar; only the engine does.
"""

from __future__ import annotations

import msgspec

from tridecode.backend.base.errors import RequestError, UnsupportedError

#: kind -> what `text` holds
KINDS = {
    "json_schema": "a JSON schema",
    "json": "nothing: the answer is any JSON object",
    "regex": "a regular expression that matches the whole answer",
    "choice": "a JSON array of strings; the answer is one of them",
    "grammar": "a context-free grammar, in Lark's notation or in EBNF (GBNF of llama.cpp)",
    "structural_tag": "a JSON object with `structures` and `triggers`, as in vLLM",
}
#: default of max_grammar_bytes in config.pbtxt
MAX_GRAMMAR_BYTES = 256 << 10


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar that each answer to a prompt obeys.

    kind: one of KINDS. text: see there; "" for "json".
    """

    kind: str
    text: str = ""


def check(output: StructuredOutput, max_bytes: int, fault: str = "") -> None:
    """Raise RequestError for a value out of range, UnsupportedError if the engine cannot constrain answers.

    The text is not parsed. max_bytes: its limit in UTF-8. fault: why the engine cannot; "": it can.
    """
    kind, text = output.kind, output.text
    if kind not in KINDS:
        raise RequestError(f"structured_output has the kind {kind[:40]!r}; wanted one of {', '.join(KINDS)}")
    if fault:
        raise UnsupportedError(f"structured_output is {kind}, and {fault}")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:  # JSON can hold lone surrogates
        raise RequestError(f"structured_output has a {kind} that is not valid UTF-8 text") from None
    if size > max_bytes:
        found = f"structured_output has a {kind} of {size:,} bytes"
        wanted = f"{max_bytes:,} (max_grammar_bytes in config.pbtxt)"
        raise RequestError(f"{found}; this model accepts {wanted}")
    if (kind == "json") is bool(text):
        found = f"structured_output has the kind {kind} and {size:,} bytes of text"
        raise RequestError(f"{found}; wanted {KINDS[kind]}")
