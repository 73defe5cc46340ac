"""Tokens that a grammar forces are drafts: they change the number of steps and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.backend.engine.grammar_models import (
    END,
    OTHER_END,
    constrained_engine,
    random_model,
    sampled,
    tokenizer_folder,
)
from tests.backend.engine.offline_models import run_in_flight
from tests.backend.engine.test_grammars import REGEXES, SCHEMAS
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import TINY_VOCAB, save, tiny_tokenizer
from tests.waiting import wait_until
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.device import preparation
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.engine.parts.masks import Masks
from tridecode.backend.engine.schedule import masked_rows
from tridecode.backend.engine.schedule.drafts import may_verify
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.device_ids import DeviceIds
from tridecode.backend.engine.speculation.host_lookup import HostLookup
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.sources import AnswerSources
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER.encode("the ferry leaves at", add_special_tokens=False)
#: long keys, short values
KEYS = {
    "type": "object",
    "properties": {
        "name_of_the_passenger": {"enum": ["f", "t"]},
        "departure_from_the_harbour": {"type": "boolean"},
        "arrival_at_the_other_harbour": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name_of_the_passenger", "departure_from_the_harbour", "arrival_at_the_other_harbour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
MORE_REGEXES = ["the ferry leaves at [0-9]{2}:[0-9]{2}, platform [a-c]", "(north|south) harbour( ferry)?"]
CHOICES = ["the early ferry", "the early train", "no", "never again", ""]
SIZES = {"max_sequences": 160, "max_step_tokens": 256, "max_draft_tokens": 15}


@pytest.fixture(autouse=True)
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get every draft, whatever the steps of this machine cost."""
    monkeypatch.setattr(preparation, "measured_costs", lambda engine, most_queries: None)


def outputs() -> list[StructuredOutput]:
    schemas = [StructuredOutput("json_schema", json.dumps(one)) for one in [KEYS, *SCHEMAS]]
    regexes = [StructuredOutput("regex", one) for one in [*MORE_REGEXES, *REGEXES] if "\\d" not in one]
    return [*schemas, *regexes, StructuredOutput("choice", json.dumps(CHOICES))]


def submitted(
    offline: OfflineEngine, requests: Sequence[tuple[StructuredOutput | None, SamplingParams]]
) -> list[int]:
    """Submit requests and wait for their grammars: a step that has a prompt has no drafts."""
    numbers = [offline.submit(PROMPT, params, structured_output=output) for output, params in requests]
    grammars = offline.scheduler.grammars
    wait_until(lambda: grammars._compiled.qsize() >= grammars.num_waiting, 60.0)
    return numbers


def run(
    offline: OfflineEngine, requests: Sequence[tuple[StructuredOutput | None, SamplingParams]]
) -> list[Generation]:
    numbers = submitted(offline, requests)
    offline.run()
    return [offline.generations[number] for number in numbers]


def both(
    requests: Sequence[tuple[StructuredOutput | None, SamplingParams]], **settings: Any
) -> tuple[list[Generation], list[Generation], OfflineEngine]:
    """Return the answers without speculation and with it, and the engine of the second."""
    plain = constrained_engine(**{**SIZES, **settings})
    drafting = constrained_engine(**{**SIZES, "speculation": "lookup", **settings})
    try:
        return run(plain, requests), run(drafting, requests), drafting
    finally:
        plain.scheduler.grammars.close()
        drafting.scheduler.grammars.close()


def assert_same(found: list[Generation], wanted: list[Generation]) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.tokens == other.tokens and one.finish == other.finish, number
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4), number


def accepted(offline: OfflineEngine) -> int:
    drafts = offline.scheduler.planner.drafts
    assert drafts is not None and drafts.learning is not None
    return drafts.learning.accepted["grammar"]


def text_of(generation: Generation) -> str:
    ended = generation.tokens[-1:] in ([END], [OTHER_END])
    return TOKENIZER.decode(generation.tokens[:-1] if ended else generation.tokens)


def is_valid(output: StructuredOutput, text: str) -> bool:
    if output.kind == "json_schema":
        checker = jsonschema.FormatChecker()
        jsonschema.validate(json.loads(text), json.loads(output.text), format_checker=checker)
        return True
    if output.kind == "regex":
        return re.fullmatch(output.text, text) is not None
    return text in CHOICES


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_one_token_a_step(temperature: float) -> None:
    wanted = outputs()
    requests = [
        (output, sampled(seed=seed, temperature=temperature, return_log_probs=True, max_tokens=120))
        for seed, output in enumerate(wanted)
    ]
    plain, found, offline = both(requests)
    assert_same(found, plain)
    assert accepted(offline) > 60
    ended = [(output, one) for output, one in zip(wanted, found) if one.finish == "end_id"]
    assert len(ended) > 0.6 * len(wanted)
    for output, one in ended:
        assert is_valid(output, text_of(one)), output.text


def counted(offline: OfflineEngine) -> list[StepPlan]:
    """Return the list to which every plan from now on is added."""
    plans, launch = [], offline.engine.launch

    def counting(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    offline.engine.launch = counting  # type: ignore[method-assign]
    return plans


def free_tokens(tokens: list[int], output: StructuredOutput, offline: OfflineEngine) -> int:
    """Return how many tokens of an answer had an alternative, by masks of the grammar alone."""
    compiler = offline.scheduler.grammars._compiler
    assert compiler is not None
    matcher, free = compiler.compile(output), 0
    for token in tokens:
        mask = np.zeros(-(-random_model().config.vocab_size // 32), np.int32)
        matcher.fill(mask)
        free += int(np.unpackbits(mask.view(np.uint8)).sum()) > 1
        if token not in (END, OTHER_END):
            matcher.accept([token])
    return free


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_schema_with_long_keys_takes_about_as_many_steps_as_its_free_tokens(seed: int) -> None:
    offline = constrained_engine(**SIZES, speculation="lookup")
    plans, output = counted(offline), StructuredOutput("json_schema", json.dumps(KEYS))
    (answer,) = run(offline, [(output, sampled(seed=seed))])
    assert is_valid(output, text_of(answer)) and answer.finish == "end_id"
    free = free_tokens(answer.tokens, output, offline)
    offline.scheduler.grammars.close()
    # a run of forced tokens takes a step for each 16 of them, and the schema has seven runs
    assert len(answer.tokens) > 60 and free < 8
    assert len(plans) <= free + 10
    assert accepted(offline) >= len(answer.tokens) - len(plans)


#: rules that count the tokens before, and ends
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6, "presence_penalty": 0.4, "return_log_probs": True},
    {"frequency_penalty": 0.7, "temperature": 1.3, "return_log_probs": True},
    {"top_p": 0.8, "top_p_decay": 0.8, "temperature": 0.9},
    {"top_k": 4, "min_p": 0.01, "return_log_probs": True},
    {"bad_words": [[18], [19, 20]]},
    {"min_tokens": 9},
    {"stop_words": [[71, 84]]},
    {"max_tokens": 13},
    {"end_id": -1, "more_end_ids": []},
    {"num_return_sequences": 3, "temperature": 1.1},
    {"allowed_token_ids": [*range(3, 24), *range(25, TINY_VOCAB), END]},
    {"speculate": False},
]


def ruled() -> list[tuple[StructuredOutput | None, SamplingParams]]:
    """Requests with each rule, and one without a grammar among them."""
    texts = [StructuredOutput("json_schema", json.dumps(KEYS)), StructuredOutput("regex", MORE_REGEXES[0])]
    found: list[tuple[StructuredOutput | None, SamplingParams]] = [(None, sampled(seed=9, max_tokens=40))]
    for seed, rule in enumerate(RULES):
        found += [(text, sampled(**{"seed": seed, "max_tokens": 100, **rule})) for text in texts]
    return found


def test_every_rule_of_sampling_is_that_of_one_token_a_step() -> None:
    requests = ruled()
    plain, found, offline = both(requests, max_sequence_tokens=256)
    assert_same(found, plain)
    for one, other in zip(found, plain):
        assert_same(one.sequences[1:], other.sequences[1:])
    assert {one.finish for one in found} == {"end_id", "stop_word", "length"}
    assert accepted(offline) > 150
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


def test_steps_in_flight_keep_the_answers() -> None:
    """Another step is launched before the counts of one with forced tokens are known, as on a GPU."""
    requests = ruled()[:15]
    plain = constrained_engine(**SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**SIZES, speculation="lookup")
    numbers = submitted(offline, requests)
    run_in_flight(offline, 2)
    assert_same([offline.generations[number] for number in numbers], wanted)
    assert accepted(offline) > 100
    offline.scheduler.grammars.close()


def test_neighbours_without_a_grammar_keep_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers repeat, so that look-up finds them."""
    free: list[tuple[StructuredOutput | None, SamplingParams]] = [
        (None, sampled(seed=9, max_tokens=60)) for _ in range(2)
    ]
    grammar = [(StructuredOutput("regex", one), sampled(seed=3)) for one in ("[a-c]{100}", MORE_REGEXES[0])]
    plain, drafting = constrained_engine(**SIZES), constrained_engine(**SIZES, speculation="lookup")
    wanted = [*run(plain, free), *run(plain, [*free, *grammar])]
    run(drafting, free)
    plans, learning = counted(drafting), drafting.scheduler.planner.drafts.learning
    before = learning.accepted["lookup"]
    monkeypatch.setattr(masked_rows, "MASK_WAIT_S", 10.0)  # no step leaves a row out
    found = run(drafting, [*free, *grammar])
    assert_same(found, wanted[2:])
    assert learning.accepted["lookup"] - before > 60
    assert any(plan.queries and plan.part(Masks) is not None for plan in plans)
    for offline in (plain, drafting):
        offline.scheduler.grammars.close()


def test_forced_tokens_come_beside_a_draft_model() -> None:
    """The draft model drafts for the sequences without a grammar."""
    requests = ruled()[:9]
    plain, found, offline = both(requests)
    assert_same(found, plain)
    drafting = constrained_engine(**SIZES, speculation="draft", draft=random_model())
    again = run(drafting, requests)
    assert_same(again, plain)
    assert accepted(drafting) > 50 and accepted(offline) > 50
    assert drafting.scheduler.planner.drafts.learning.accepted["draft"] > 10
    drafting.scheduler.grammars.close()


def test_a_request_without_speculation_has_no_drafts() -> None:
    output = StructuredOutput("regex", MORE_REGEXES[0])
    plain, found, offline = both([(output, sampled(seed=1, speculate=False))])
    assert_same(found, plain)
    assert accepted(offline) == 0


@pytest.mark.parametrize("values", [{"bad_words": [[86]]}, {"min_tokens": 90}])
def test_a_forced_token_that_is_excluded_ends_the_request_where_it_does_without_drafts(values: dict) -> None:
    """The text of the error has the number of tokens that came before."""
    output, texts = StructuredOutput("regex", MORE_REGEXES[0]), []
    for speculation in ("off", "lookup"):
        offline = constrained_engine(**SIZES, speculation=speculation)
        with pytest.raises(RequestError, match="no token is possible after") as caught:
            run(offline, [(output, sampled(seed=1, **values))])
        texts.append(str(caught.value))
        offline.scheduler.grammars.close()
    assert texts[0] == texts[1]
    assert accepted(offline) > 3


def test_preempted_sequences_equal_undisturbed_ones() -> None:
    outputs = [StructuredOutput("regex", MORE_REGEXES[0]), StructuredOutput("json_schema", json.dumps(KEYS))]
    requests = [(output, sampled(seed=seed)) for seed, output in enumerate(outputs * 3)]
    plain = constrained_engine(**SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    block = plain.engine.state.block_bytes()
    offline = constrained_engine(
        **SIZES, speculation="lookup", prefix_cache=False, max_sequence_tokens=256, cache_bytes=34 * block
    )
    assert_same(run(offline, requests), wanted)
    assert offline.scheduler.counters.preemptions > 0
    assert accepted(offline) > 50
    offline.scheduler.grammars.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that neither two ranks nor words of 32 bits divide."""
    folder = tmp_path_factory.mktemp("ranks")
    model = random_model(TINY_VOCAB + 51, layers=2)
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


@pytest.mark.parametrize(("tensor", "stages", "pipelined"), [(2, 1, False), (1, 2, True), (2, 2, True)])
def test_ranks_give_the_answers_of_one_rank(
    directory: Path, tensor: int, stages: int, pipelined: bool
) -> None:
    folder, requests = tokenizer_folder(), ruled()[:11]

    def answers(offline: OfflineEngine) -> list[Generation]:
        if tensor * stages > 1:
            policy = DepthPolicy(None, 15)
            host = HostLookup(15, 1000) if pipelined else None
            drafter = host or DeviceIds()
            learning = Learning(policy, AnswerSources(may_verify) if host else None, host)
            offline.scheduler.planner.use_drafter(drafter, learning, 15)
        found = run(offline, requests)
        if tensor * stages > 1:
            assert accepted(offline) > 50
        return found

    sizes = {"max_sequences": 64, "max_step_tokens": 128, "tokenizer_dir": folder, "max_sequence_tokens": 160}
    wanted, _ = on_ranks(directory, 1, 1, answers, **sizes)
    found, _ = on_ranks(directory, tensor, stages, answers, pipelined, **sizes)
    assert_same(found, wanted)
