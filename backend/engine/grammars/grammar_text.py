"""Turns a StructuredOutput into the text of a grammar in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from tridecode.backend.engine.grammars.exact_schemas import strict_options
from tridecode.backend.engine.grammars.matcher import GrammarFault, Vocabulary
from tridecode.backend.wire.structured_output import StructuredOutput

#: its converter is Python, which keeps the loop's thread from running: 2 ms per KiB
MAX_EBNF_BYTES = 32 << 10
#: between two values of JSON; without a limit a model may write spaces until max_tokens
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ANY_OBJECT = '{"type": "object"}'
#: the first rule of a grammar in Lark's notation, as `?start:` or `start[attribute]:`; `start ::=` is EBNF
_START = re.compile(r"^\s*[?!]?start\s*(?:\[[^\]\n]*\])?\s*:(?!:)|^%llguidance\b", re.MULTILINE)
#: an attribute of a rule that is for the sampler: `answer[temperature=0.5]: ...`
_TEMPERATURE = re.compile(r"^\s*[A-Za-z_]\w*\s*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
#: literals, comments and regular expressions of Lark's notation
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/')
#: flags with which the classes below mean something else, or `#` begins a comment
_FLAGS = re.compile(r"\(\?[a-zA-Z-]*[ux]")
#: class -> what every dialect has in it, and what one of them may have in it, for a negated class
_CLASSES = {
    "d": ("[0-9]", r"\d"),
    "w": ("[0-9A-Za-z_]", r"[\w\p{N}]"),
    "s": (r"[\t\n\x0B\x0C\r\x20]", r"[\s\x1C-\x1F]"),
    "D": (r"\D", "[^0-9]"),
    "W": (r"[^\w\p{N}]", "[^0-9A-Za-z_]"),
    "S": (r"[^\s\x1C-\x1F]", r"[^\t\n\x0B\x0C\r\x20]"),
}
_PART = re.compile(r"\\.?|\[:[^\]]*:\]|\[\^?\]?|\]|[^\\\[\]]+", re.DOTALL)


def grammar_of(output: StructuredOutput, vocabulary: Vocabulary) -> str:
    """Return the grammar. Raises GrammarFault for a text that is not of its kind."""
    if output.kind == "json":
        return _of_schema(_ANY_OBJECT)
    if output.kind == "json_schema":
        return _of_schema(output.text)
    if output.kind == "regex":
        return str(LLMatcher.grammar_from_regex(portable(output.text)))
    if output.kind == "choice":
        return str(LLMatcher.grammar_from_lark(_of_choices(output.text)))
    if output.kind == "structural_tag":
        return str(LLMatcher.grammar_from_lark(_of_tags(output.text, vocabulary)))
    return str(LLMatcher.grammar_from_lark(_lark(output.text)))


def portable(pattern: str) -> str:
    r"""Return a regular expression whose matches Python and JavaScript match, too.

    `\d`, `\w` and `\s` have other characters beyond ASCII in each dialect, and in each version of Unicode.
    Raises GrammarFault for a backslash at the end, which the compiler would ignore.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarFault("the regular expression ends with a backslash; wanted a character after it")
    if _FLAGS.search(pattern):
        return pattern
    parts, negated = [], [False]  # one entry per open class, after that of the whole expression
    for found in _PART.finditer(pattern):
        part = found[0]
        if part[0] == "\\" and part[1:] in _CLASSES:
            part = _CLASSES[part[1]][negated[-1]]
        elif part[0] == "[" and not part.startswith("[:"):
            negated.append(negated[-1] != part.startswith("[^"))
        elif part == "]" and len(negated) > 1:
            negated.pop()
        parts.append(part)
    return "".join(parts)


def _of_schema(text: str) -> str:
    try:
        return str(
            LLMatcher.grammar_from_json_schema(
                text,
                defaults={"whitespace_pattern": _WHITESPACE},
                overrides=strict_options(text),  # type: ignore[arg-type]  # each key may be absent
            )
        )
    except ValueError as error:
        raise GrammarFault(f"the schema is not a JSON object: {error}") from None


def _of_choices(text: str) -> str:
    choices = _read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise GrammarFault(f"choice is {text[:60]!r}; wanted a JSON array of one string or more")
    if re.search("[\ud800-\udfff]", "".join(choices)):  # json.loads has joined the pairs
        raise GrammarFault("choice has a text that is not valid UTF-8")
    return "start: CHOICE\nCHOICE: " + " | ".join(_quoted(one) for one in choices)


def _lark(text: str) -> str:
    if not _START.search(text):
        size = len(text.encode("utf-8"))
        if size > MAX_EBNF_BYTES:
            raise GrammarFault(
                f"a grammar in EBNF has {size:,} bytes; wanted {MAX_EBNF_BYTES:,} at most, or one in Lark's "
                "notation, which begins with a rule `start:`"
            )
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise GrammarFault("the grammar in EBNF is nested too deeply") from None
        except Exception as error:  # the converter raises bare Exception
            raise GrammarFault(
                f"the grammar has no rule `start:` of Lark's notation, and is not valid EBNF: {error}"
            ) from None
    if _TEMPERATURE.search(text):
        raise GrammarFault("the grammar sets a temperature for a rule, which is not implemented")
    return _LARK.sub(lambda part: f"/{portable(part['regex'])}/" if part["regex"] else part[0], text)


def _of_tags(text: str, vocabulary: Vocabulary) -> str:
    """Return a grammar of free text with parts that begin with a trigger and obey a schema."""
    found = _read_json(text)
    if not isinstance(found, dict) or "structures" not in found or "triggers" not in found:
        wanted = "wanted a JSON object with `structures` and `triggers`"
        raise GrammarFault(f"structural_tag is {text[:60]!r}; {wanted}")
    unknown = set(found) - {"type", "structures", "triggers"}
    if unknown:
        raise GrammarFault(f"structural_tag has {min(unknown)[:40]!r}, which is not implemented")
    structures, triggers = found["structures"], found["triggers"]
    if not isinstance(structures, list) or not structures:
        raise GrammarFault("structural_tag has no structures; wanted a list of one or more")
    if not _are_texts(triggers):
        raise GrammarFault("structural_tag: triggers is not a list of one text or more")
    names = [f"tag_{i}" for i in range(len(structures))]
    rules = [
        "%llguidance {}",
        f"start: ({' | '.join(names)})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for name, structure in zip(names, structures):
        rules += _rules_of_tag(name, structure, triggers, vocabulary)
    return "\n".join(rules) + "\n"


def _rules_of_tag(name: str, structure: Any, triggers: list[str], vocabulary: Vocabulary) -> list[str]:
    where = f"structural_tag: structure {name.removeprefix('tag_')}"
    if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
        raise GrammarFault(f"{where} is not an object of `begin`, `schema` and `end`")
    begin, schema, end = structure["begin"], structure["schema"], structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, (dict, bool)):
        raise GrammarFault(f"{where}: wanted texts as `begin` and `end`, and a schema")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise GrammarFault(f"{where}: {begin[:40]!r} begins with none of the triggers")
    if isinstance(schema, dict):
        options = {"whitespace_pattern": _WHITESPACE, **strict_options(json.dumps(schema))}
        schema = {**schema, "x-guidance": options}
    body = [_quoted(begin[len(trigger) :]), f"%json {json.dumps(schema)}", _quoted(end)]
    body = [part for part in body if part != '""']
    special = next((i for i in sorted(vocabulary.special) if vocabulary.tokens[i] == trigger.encode()), None)
    if special is not None:
        return [f"{name}: TEXT <[{special}]> {' '.join(body)}"]
    return [f"{name}_begin[lazy]: TEXT {_quoted(trigger)}", f"{name}: {name}_begin {' '.join(body)}"]


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(one, str) and one for one in values)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarFault(f"{text[:60]!r} is not valid JSON: {error}") from None


def _quoted(text: str) -> str:
    """Return a literal of Lark's notation."""
    return json.dumps(text)
