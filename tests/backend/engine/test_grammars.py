"""Answers of random models at temperature 1 obey their schemas, expressions and grammars. A grammar that
cannot be obeyed ends its request by name, and no other request changes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import lark
import numpy as np
import pytest

from tests.backend.engine.grammar_models import END, OTHER_END, constrained_engine, random_model, sampled
from tests.backend.engine.offline_models import offline_engine
from tests.checkpoints import TINY_VOCAB, tiny_tokenizer
from tests.waiting import wait_until
from tridecode.backend.base.errors import RequestError, TridecodeError, UnsupportedError
from tridecode.backend.engine.grammars.service import MOST_TOGETHER, Grammars, Start
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import Sent, SequenceRequest, Submit
from tridecode.backend.wire.structured_output import StructuredOutput

TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER.encode("the ferry leaves at", add_special_tokens=False)
#: short answers, so that random models come to their end
SCHEMAS = [
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", 7, None, ["x"]]},
    {"const": {"a": [1, "b"]}},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0.5, "maximum": 2.5},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["a", "b"]}], "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"name": {"enum": ["ferry", "train"]}, "at": {"type": "string", "pattern": "^[0-2]h$"}},
        "required": ["name", "at"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {
        "$defs": {"leaf": {"enum": ["l"]}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
]  # fmt: skip
REGEXES = ["[0-9]{3}-[a-c]{1,4}", "(yes|no)!?", "é+x{2,3}", r"\d{1,3}\.\d{2} EUR", "(ab|cd){2}", "(?i)stop"]
LARK = """
start: expression
expression: term (("+" | "-") term)~0..2
term: NUMBER | "(" expression ")"
NUMBER: /[0-9]{1,2}/
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    offline = constrained_engine()
    yield offline
    offline.scheduler.grammars.close()


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def text_of(generation: Generation) -> str:
    ended = generation.tokens[-1:] in ([END], [OTHER_END])
    return TOKENIZER.decode(generation.tokens[:-1] if ended else generation.tokens)


def answers(offline: OfflineEngine, outputs: list[StructuredOutput], **values: object) -> list[Generation]:
    """Return the answer to each of them, in one batch, with seeds of their own."""
    numbers = [
        offline.submit(PROMPT, sampled(seed=seed, **values), structured_output=output)
        for seed, output in enumerate(outputs)
    ]
    offline.run()
    return [offline.generations[number] for number in numbers]


def refusal(offline: OfflineEngine, output: StructuredOutput, **values: object) -> TridecodeError:
    """Return the error with which a request ends."""
    with pytest.raises(TridecodeError) as caught:
        offline.submit(PROMPT, sampled(**values), structured_output=output)
        offline.run()
    return caught.value


def finished(found: list[Generation], least: float) -> list[Generation]:
    """Return the answers that ended by themselves, at least this share of them."""
    ended = [one for one in found if one.finish == "end_id"]
    assert len(ended) >= least * len(found), [one.finish for one in found]
    return ended


def test_answers_are_valid_by_their_schemas(engine: OfflineEngine) -> None:
    for wanted in SCHEMAS:
        for answer in finished(answers(engine, [schema(wanted)] * 2), 0.5):
            value = json.loads(text_of(answer))
            jsonschema.validate(value, wanted, format_checker=jsonschema.FormatChecker())


def test_any_json_is_an_object(engine: OfflineEngine) -> None:
    for answer in answers(engine, [StructuredOutput("json")] * 4):
        text = text_of(answer)
        assert text.startswith("{")
        if answer.finish == "end_id":
            assert isinstance(json.loads(text), dict)


def test_answers_match_their_regular_expression(engine: OfflineEngine) -> None:
    for pattern in REGEXES:
        for answer in finished(answers(engine, [StructuredOutput("regex", pattern)] * 3), 1.0):
            assert re.fullmatch(pattern, text_of(answer)), pattern


def test_an_answer_is_one_of_the_choices(engine: OfflineEngine) -> None:
    choices = ["yes", "no", "yes, but", '\u00e9\n"\\', ""]
    found = answers(engine, [StructuredOutput("choice", json.dumps(choices))] * 24)
    texts = [text_of(answer) for answer in finished(found, 1.0)]
    assert set(texts) <= set(choices) and len(set(texts)) > 1


def test_answers_are_sentences_of_their_grammar(engine: OfflineEngine) -> None:
    parser = lark.Lark(LARK, parser="earley", lexer="dynamic_complete")
    for answer in finished(answers(engine, [StructuredOutput("grammar", LARK)] * 8, max_tokens=100), 0.3):
        parser.parse(text_of(answer))


def test_answers_are_sentences_of_a_grammar_in_ebnf(engine: OfflineEngine) -> None:
    ebnf = 'root ::= item ("," item){0,3}\nitem ::= "x" [0-9] | "y"'
    for answer in finished(answers(engine, [StructuredOutput("grammar", ebnf)] * 4), 1.0):
        assert re.fullmatch(r"(x[0-9]|y)(,(x[0-9]|y)){0,3}", text_of(answer))


def test_a_tag_is_free_text_up_to_its_trigger(engine: OfflineEngine) -> None:
    arguments = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    structure = {"begin": "<fn=get>", "schema": {**arguments, "additionalProperties": False}, "end": "</fn>"}
    tags = StructuredOutput("structural_tag", json.dumps({"structures": [structure], "triggers": ["<fn="]}))
    matcher = engine.scheduler.grammars._compiler.compile(tags)
    ids = TOKENIZER.encode('hello <fn=get>{"n":2}</fn> and more', add_special_tokens=False)
    matcher.accept(ids)
    assert matcher.is_accepting()
    wrong = engine.scheduler.grammars._compiler.compile(tags)
    with pytest.raises(RequestError, match="cannot obey"):
        wrong.accept(TOKENIZER.encode('hello <fn=get>{"n":3}', add_special_tokens=False))


def test_ids_that_pad_the_vocabulary_are_never_drawn(engine: OfflineEngine) -> None:
    (answer,) = answers(engine, [StructuredOutput("regex", r"(.|\n){150,}")])
    assert len(answer.tokens) >= 75 and max(answer.tokens) < TINY_VOCAB


def test_every_sample_obeys_and_they_differ(engine: OfflineEngine) -> None:
    output = StructuredOutput("regex", "[a-z]{6}")
    (answer,) = answers(engine, [output], num_return_sequences=3)
    texts = [text_of(one) for one in answer.sequences]
    assert len(set(texts)) == 3 and all(re.fullmatch("[a-z]{6}", text) for text in texts)


def test_an_answer_is_the_same_alone_and_in_a_batch(engine: OfflineEngine) -> None:
    outputs = [schema(SCHEMAS[16]), StructuredOutput("regex", REGEXES[0]), StructuredOutput("grammar", LARK)]
    penalties = {"max_tokens": 40, "repetition_penalty": 1.2, "temperature": 1.3, "top_p": 0.9}
    together = answers(engine, outputs, **penalties)
    plain = engine.submit(PROMPT, sampled(seed=9, max_tokens=40))
    engine.run()
    for seed, output in enumerate(outputs):
        number = engine.submit(PROMPT, sampled(seed=seed, **penalties), structured_output=output)
        neighbour = engine.submit(PROMPT, sampled(seed=9, max_tokens=40))
        engine.run()
        assert engine.generations[number].tokens == together[seed].tokens
        assert engine.generations[neighbour].tokens == engine.generations[plain].tokens


def test_log_probabilities_are_those_of_the_possible_tokens(engine: OfflineEngine) -> None:
    """A token without an alternative has probability 1, whatever the model says."""
    (answer,) = answers(
        engine, [StructuredOutput("choice", '["7"]')], return_log_probs=True, end_id=END, more_end_ids=[]
    )
    assert len(answer.tokens) == 2 and answer.log_probs == pytest.approx([0.0, 0.0], abs=1e-6)


def test_an_answer_without_an_end_token_ends_when_it_is_complete(engine: OfflineEngine) -> None:
    (answer,) = answers(engine, [StructuredOutput("choice", '["yes", "no"]')], end_id=-1, more_end_ids=[])
    assert answer.finish == "end_id" and TOKENIZER.decode(answer.tokens) in ("yes", "no")


def test_a_stop_word_and_max_tokens_end_an_answer_early(engine: OfflineEngine) -> None:
    output = StructuredOutput("regex", "x+")
    (x,) = TOKENIZER.encode("x", add_special_tokens=False)
    (stopped,) = answers(engine, [output], stop_words=[[x]], bad_words=[])
    assert stopped.finish == "stop_word" and stopped.tokens[-1] == x
    (cut,) = answers(engine, [StructuredOutput("regex", "[a-z]{90}")], max_tokens=3)
    assert cut.finish == "length" and len(cut.tokens) == 3


def test_a_request_continues_on_another_engine(engine: OfflineEngine) -> None:
    """Its door sends the tokens that the lost engine had answered."""

    output, params = schema(SCHEMAS[17]), sampled(seed=5)
    whole = engine.submit(PROMPT, params, structured_output=output)
    engine.run()
    tokens = engine.generations[whole].tokens
    request = SequenceRequest(np.array(PROMPT, "<i4").tobytes(), params, structured_output=output)
    for count in (1, len(tokens) // 2, len(tokens) - 1):
        number = len(engine.generations)
        engine.generations.append(Generation())
        sent = [Sent(np.array(tokens[:count], "<i4").tobytes())]
        engine.scheduler.submit(b"offline", Submit(number, [request], sent=sent))
        engine.run()
        assert engine.generations[number].tokens == tokens[count:], count


def test_a_preempted_answer_goes_on_as_it_would_have() -> None:
    outputs = [StructuredOutput("regex", "[a-z0-9 ]{60,70}")] * 4
    large, small = constrained_engine(), constrained_engine(cache_bytes=20 * 8 * 2 * 32 * 4)
    wanted = [one.tokens for one in answers(large, outputs, max_tokens=64)]
    found = [one.tokens for one in answers(small, outputs, max_tokens=64)]
    assert small.scheduler.counters.preemptions > 0 and found == wanted


#: kind of schema or grammar -> it, and part of the refusal
REFUSED = {
    "uniqueItems": (schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
    "dependentRequired": (schema({"type": "object", "dependentRequired": {"a": ["b"]}}), "dependentRequired"),
    "not": (schema({"not": {"type": "null"}}), '"not"'),
    "if": (schema({"if": {"type": "null"}, "then": {}}), '"if", "then"'),
    "oneOf": (
        schema({"oneOf": [{"type": "string"}, {"minLength": 3}]}),
        "oneOf with alternatives that may overlap",
    ),
    "format": (schema({"type": "string", "format": "flurb"}), "Unknown format: flurb"),
    "lenient": (
        schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}),
        "uniqueItems",
    ),
    "lenient in a grammar": (
        StructuredOutput(
            "grammar", 'start: %json {"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}'
        ),
        "uniqueItems",
    ),
    "temperature": (StructuredOutput("grammar", "start: x\nx[temperature=0.5]: /a/"), "temperature"),
    "remote": (schema({"$ref": "http://example.com/schema"}), "does not fetch"),
    "no JSON": (StructuredOutput("json_schema", "{"), "not a JSON object"),
    "type": (schema({"type": "objekt"}), "Invalid type: objekt"),
    "false": (StructuredOutput("json_schema", "false"), "not a JSON object"),
    "range": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater"),
    "endless reference": (schema({"$ref": "#"}), "no finite value satisfies it"),
    "endless rule": (StructuredOutput("grammar", "start: start"), "allows no token"),
    "unknown rule": (StructuredOutput("grammar", "start: a"), 'unknown name: "a"'),
    "no grammar": (StructuredOutput("grammar", "hello"), "not valid EBNF"),
    "nested EBNF": (StructuredOutput("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "EBNF"),
    "look-ahead": (StructuredOutput("regex", "a(?=b)"), "look-around"),
    "unbalanced": (StructuredOutput("regex", "(a"), "unclosed group"),
    "nothing": (StructuredOutput("regex", r"[^\x00-\U0010FFFF]"), "allows no token"),
    "nested": (StructuredOutput("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "recursion limit"),
    "explosion": (
        schema({"allOf": [{"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "ab"]} for i in range(20)]}),
        "schema too large",
    ),
    "choices": (StructuredOutput("choice", '["a", 1]'), "wanted a JSON array of one string or more"),
    "tags": (StructuredOutput("structural_tag", "{}"), "`structures` and `triggers`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_obeyed_ends_its_request_alone(engine: OfflineEngine, name: str) -> None:
    """Another request in the batch gets the tokens that it gets alone."""
    output, part = REFUSED[name]
    alone = engine.submit(PROMPT, sampled(seed=4, max_tokens=20))
    engine.run()
    beside = engine.submit(PROMPT, sampled(seed=4, max_tokens=20))
    begun = time.thread_time()
    error = refusal(engine, output)
    assert time.thread_time() - begun < 5.0
    engine.run()
    assert isinstance(error, RequestError) and part in str(error), error
    assert f"structured_output ({output.kind})" in str(error) or "obey" in str(error)
    assert len(str(error)) < 700
    assert engine.generations[beside].tokens == engine.generations[alone].tokens
    assert not engine.scheduler.has_work and engine.scheduler.grammars.num_waiting == 0


def test_a_grammar_that_stops_allowing_tokens_ends_its_request(engine: OfflineEngine) -> None:
    error = refusal(engine, StructuredOutput("regex", r"a[^\x00-\U0010FFFF]"))
    assert "allows no token" in str(error)


def test_end_ids_that_are_held_back_leave_no_token(engine: OfflineEngine) -> None:
    error = refusal(engine, StructuredOutput("choice", '["a"]'), min_tokens=5)
    assert "no token is possible after" in str(error) and "the grammar allows" in str(error)


def test_a_mask_beyond_its_cpu_time_ends_its_request() -> None:
    offline = constrained_engine(mask_cpu_ms=1e-4)
    error = refusal(offline, StructuredOutput("regex", "[a-z]{9}"))
    assert re.search(
        r"of one token took [\d.]+ ms of CPU time; this model accepts 0.0001 \(mask_cpu_ms", str(error)
    )


def test_a_beam_search_with_a_grammar_is_refused(engine: OfflineEngine) -> None:
    with pytest.raises(UnsupportedError, match="structured_output is json and beam_width is 2"):
        engine.submit(PROMPT, sampled(beam_width=2), structured_output=StructuredOutput("json"))


def test_a_grammar_beyond_the_limit_is_refused() -> None:
    offline = constrained_engine(max_grammar_bytes=100)
    with pytest.raises(RequestError, match="regex of 101 bytes; this model accepts 100"):
        offline.submit(PROMPT, sampled(), structured_output=StructuredOutput("regex", "a" * 101))


def test_an_engine_without_a_tokenizer_refuses_every_grammar() -> None:
    offline = offline_engine(random_model())
    with pytest.raises(UnsupportedError, match="names a tokenizer"):
        offline.submit(PROMPT, sampled(), structured_output=StructuredOutput("json"))


def test_a_cancelled_request_does_not_wait_for_its_grammar(engine: OfflineEngine) -> None:
    number = engine.submit(
        PROMPT, sampled(), structured_output=schema({"enum": [f"v{i}" for i in range(9000)]})
    )
    engine.scheduler.cancel(b"offline", number)
    assert not engine.scheduler.has_work and engine.scheduler.grammars.num_waiting == 0
    engine.run()
    assert engine.generations[number].tokens == []


def test_equal_grammars_are_compiled_once(engine: OfflineEngine) -> None:
    class Counting:
        calls = 0

        def compile(self, output: StructuredOutput):
            self.calls += 1
            return compiler.compile(output)

        def advance(self, *given: Any) -> Any:
            return compiler.advance(*given)

    grammars, counting = engine.scheduler.grammars, Counting()
    compiler, grammars._compiler = grammars._compiler, counting
    try:
        for _ in range(3):
            answers(engine, [StructuredOutput("regex", "only here [0-9]")])
    finally:
        grammars._compiler = compiler
    assert counting.calls == 1


def test_allowed_token_ids_limit_what_the_grammar_allows(engine: OfflineEngine) -> None:
    """Several constrained rows in one batch, so that masks come from the common fill and from single ones."""
    letters = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcxyz"]
    output = StructuredOutput("regex", "[a-z]{4,9}")
    wide = answers(engine, [output] * 3)
    assert any(set(one.tokens[:-1]) - set(letters) for one in wide)
    for count in (1, 3):
        for one in finished(answers(engine, [output] * count, allowed_token_ids=[*letters, END]), 1.0):
            assert set(one.tokens) <= {*letters, END} and re.fullmatch("[abcxyz]{4,9}", text_of(one))


def test_the_first_token_obeys_the_grammar_although_the_request_allows_others(engine: OfflineEngine) -> None:
    """The slot starts in the step that draws the first token, with a mask of its own."""
    letters = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
    digit = TOKENIZER.encode("7", add_special_tokens=False)[0]
    params = {"allowed_token_ids": [*letters, digit, END], "logit_bias": {digit: 1000.0}}
    (one,) = answers(engine, [StructuredOutput("regex", "[a-z]{4,9}")], **params)
    assert re.fullmatch("[abc]{4,9}", text_of(one))


class _Panic(BaseException):
    """Like pyo3's PanicException, which is not an Exception."""


class _Panicking:
    """A compiler one of whose methods panics."""

    def __init__(self, compiler: Any, name: str):
        self._compiler, self._name = compiler, name

    def __getattr__(self, name: str) -> Any:
        return self._panic if name == self._name else getattr(self._compiler, name)

    def _panic(self, *_: object) -> None:
        raise _Panic("index out of bounds")


@pytest.mark.parametrize("name", ["compile", "advance"])
def test_a_panic_of_the_library_ends_its_request_and_no_thread(engine: OfflineEngine, name: str) -> None:
    grammars, output = engine.scheduler.grammars, StructuredOutput("regex", f"{name} [a-c]{{2}}")
    compiler, grammars._compiler = grammars._compiler, _Panicking(grammars._compiler, name)  # type: ignore
    try:
        assert "_Panic" in str(refusal(engine, output))
    finally:
        grammars._compiler = compiler
    assert re.fullmatch(f"{name} [a-c]{{2}}", text_of(answers(engine, [output])[0]))


class _Compiler:
    """Counts the matchers of each call; its matchers are None."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def compile(self, output: StructuredOutput) -> Any:
        return _Free()

    def advance(self, matchers: list[Any], tokens: list[int], masks: np.ndarray) -> list[None]:
        self.sizes.append(len(matchers))
        return [None] * len(matchers)


class _Free:
    """A matcher that allows everything."""

    def copy(self) -> _Free:
        return self

    def accept(self, tokens: list[int]) -> None: ...

    def fill(self, mask: np.ndarray) -> None: ...


def test_the_masks_of_a_step_are_computed_together() -> None:
    """A call for each mask would make threads take turns with the loop, and cost several times as much."""
    compiler = _Compiler()
    grammars = Grammars(compiler, 64, [1])
    sequences = [SimpleNamespace(constraint=None) for _ in range(2 * MOST_TOGETHER + 3)]
    starts = [Start(one, [1], [], []) for one in sequences]
    try:
        grammars.want("group", StructuredOutput("regex", "a"), starts)
        wait_until(lambda: grammars.has_news, 60.0)
        assert grammars.take_ready() == [("group", None)]
        for _ in range(3):
            for one in sequences:
                grammars.advance(one, [5])
            grammars.flush()
            done: list[Any] = []
            while grammars.outstanding:
                done += grammars.settle(0.1)
            assert sorted(map(id, done)) == sorted(map(id, sequences))
        assert compiler.sizes == [MOST_TOGETHER, MOST_TOGETHER, 3] * 3
        assert grammars.counts.masks == 3 * len(sequences)
    finally:
        grammars.close()
