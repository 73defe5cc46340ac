"""Drafts that look-up finds for sequences that obey a grammar change the number of steps and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backend.engine.grammar_models import constrained_engine, random_model, sampled, tokenizer_folder
from tests.backend.engine.test_forced_tokens import begun, grammars, ids_of, mask_at
from tests.backend.engine.test_grammar_drafts import (
    SIZES,
    TOKENIZER,
    assert_same,
    counted,
    every_draft,
    is_valid,
    ruled,
    run,
    text_of,
)
from tests.backend.engine.test_grammars import SCHEMAS
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import TINY_VOCAB, save
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.engine.schedule.drafts import may_verify
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.host_lookup import HostLookup
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.sources import AnswerSources
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

__all__ = ["every_draft", "grammars"]  # fixtures
LETTERS = StructuredOutput("regex", "[a-f0-9]{60,90}")


def learning_of(offline: OfflineEngine) -> Learning:
    drafts = offline.scheduler.planner.drafts
    assert drafts is not None and drafts.learning is not None
    return drafts.learning


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_that_comes_again_is_drafted_from_the_first(temperature: float) -> None:
    outputs = [LETTERS, *(StructuredOutput("json_schema", json.dumps(one)) for one in SCHEMAS)]
    requests = [
        (output, sampled(seed=seed, temperature=temperature, max_tokens=120, return_log_probs=True))
        for seed, output in enumerate(outputs)
    ]
    plain = constrained_engine(**SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**SIZES, speculation="lookup")
    assert_same(run(offline, requests), wanted)
    plans, before = counted(offline), learning_of(offline).accepted["lookup"]
    found = run(offline, requests)
    assert_same(found, wanted)
    assert learning_of(offline).accepted["lookup"] - before > 60
    assert len(plans) < max(len(one.tokens) for one in wanted)
    for output, one in zip(outputs, found):
        assert one.finish != "end_id" or is_valid(output, text_of(one))
    offline.scheduler.grammars.close()


def test_every_rule_of_sampling_is_that_of_one_token_a_step() -> None:
    requests = ruled()
    plain = constrained_engine(**SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**SIZES, speculation="lookup")
    for _ in range(2):
        found = run(offline, requests)
        assert_same(found, wanted)
        for one, other in zip(found, wanted):
            assert_same(one.sequences[1:], other.sequences[1:])
    assert learning_of(offline).accepted["lookup"] > 30
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"
    offline.scheduler.grammars.close()


def test_look_up_drafts_for_grammars_beside_a_draft_model() -> None:
    """A match as long as the drafts of the draft model are good replaces them."""
    requests = [(LETTERS, sampled(seed=3, max_tokens=90)), *ruled()[:3]]
    plain = constrained_engine(**SIZES)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**SIZES, speculation="lookup+draft", draft=random_model())
    for _ in range(2):
        assert_same(run(offline, requests), wanted)
    accepted = learning_of(offline).accepted
    assert accepted["lookup"] > 30 and accepted["grammar"] > 30
    offline.scheduler.grammars.close()


def test_a_clients_drafts_count_up_to_the_first_that_the_grammar_refuses() -> None:
    plain = constrained_engine(**SIZES)
    (wanted,) = run(plain, [(LETTERS, sampled(seed=3, max_tokens=120))])
    plain.scheduler.grammars.close()
    refused = TOKENIZER.encode("the ferry", add_special_tokens=False)
    drafts = [*wanted.tokens[:30], *refused, *wanted.tokens[30:]]
    offline = constrained_engine(**SIZES, speculation="lookup")
    (found,) = run(
        offline,
        [(LETTERS, sampled(seed=3, max_tokens=120, draft_tokens=drafts, return_perf_metrics=True))],
    )
    assert_same([found], [wanted])
    learning = learning_of(offline)
    assert learning.accepted["client"] > 20
    assert found.perf is not None
    assert found.perf.draft_tokens == sum(learning.drafted.values())
    offline.scheduler.grammars.close()


def test_proposed_drafts_end_at_the_first_that_the_grammar_refuses(grammars: Grammars) -> None:
    compiler = grammars._compiler
    assert compiler is not None
    matcher = compiler.compile(StructuredOutput("regex", "[a-f]{9}[0-9]"))
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "abcdef"]
    digit = TOKENIZER.convert_tokens_to_ids("7")
    constraint = begun(matcher)
    assert constraint.drafts == []
    constraint.advance(letters[:1], 5.0, [*letters[:4], digit, *letters[:4]])
    assert constraint.drafts == letters[:4] and not constraint.is_forced
    for i, mask in enumerate(constraint.draft_masks, 1):
        assert mask.tolist() == mask_at(matcher, letters[:1] + letters[:i]).tolist()
    assert mask_at(matcher, letters[:1]).tolist() == constraint.mask.tolist()
    constraint.advance(letters[:2], 5.0, [digit])
    assert constraint.drafts == [] and digit not in ids_of(constraint.mask)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    model = random_model(TINY_VOCAB + 51, layers=2)
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2)])
def test_stages_search_on_the_host(directory: Path, tensor: int, stages: int) -> None:
    """Rank 0 finds the drafts when a token is committed, as plans of micro-batches have all ids."""
    requests = [(LETTERS, sampled(seed=seed, max_tokens=70)) for seed in range(3)]

    def answers(offline: OfflineEngine) -> list[Generation]:
        if stages > 1:
            host = HostLookup(15, 4000)
            sources = AnswerSources(may_verify)
            learning = Learning(DepthPolicy(None, 15), sources, host)
            offline.scheduler.planner.use_drafter(host, learning, 15)
            offline.scheduler.on_end.append(sources.finished)
        first = run(offline, requests)
        second = run(offline, requests)
        assert_same(second, first)
        if stages > 1:
            assert learning.accepted["lookup"] > 60
        return second

    sizes = {
        "max_sequences": 64,
        "max_step_tokens": 128,
        "tokenizer_dir": tokenizer_folder(),
        "max_sequence_tokens": 160,
    }
    wanted, _ = on_ranks(directory, 1, 1, answers, **sizes)
    found, _ = on_ranks(directory, tensor, stages, answers, True, **sizes)
    assert_same(found, wanted)
