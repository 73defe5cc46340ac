"""Grammars that a process compiles before the first request, because the first of a kind takes longer."""

from __future__ import annotations

import json

import numpy as np

from tridecode.backend.engine.grammars.matcher import GrammarCompiler, GrammarFault
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.wire.structured_output import StructuredOutput

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer", "minimum": 0, "maximum": 150},
        "share": {"type": "number"},
        "rows": {"type": "array", "items": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/row"}]}},
        "kind": {"enum": ["friend", "work"]},
        "code": {"type": "string", "pattern": "^[a-f]{2,4}$"},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["name"],
    "$defs": {"row": {"type": "boolean"}},
}
_OUTPUTS = (
    StructuredOutput("json_schema", json.dumps(_SCHEMA)),
    StructuredOutput("regex", "[a-c]{3,5}"),
    StructuredOutput("grammar", 'start: "a" b*\nb: /[0-9]+/'),
    StructuredOutput("grammar", 'root ::= "a" [0-9]*'),
)


def warm_up(compiler: GrammarCompiler, vocab_size: int) -> None:
    """Compile a few typical grammars and their first masks."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    for output in _OUTPUTS:
        try:
            compiler.compile(prepare(output)).fill(mask)
        except GrammarFault:  # this vocabulary lacks the characters
            pass
