"""Steps that verify rows with most likely tokens or with a grammar are CUDA graphs on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from tests.backend.engine.grammar_models import constrained_engine, sampled
from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_drafts_gpu import drafting
from tests.backend.engine.test_engine_gpu import MODELS
from tests.backend.engine.test_engine_gpu import gpu_engine as engine_of
from tests.backend.engine.test_grammar_drafts import KEYS, accepted, assert_same, run
from tests.backend.engine.test_lookup import learning_of
from tests.backend.engine.test_top_log_probs_gpu import check, check_own
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput

pytestmark = pytest.mark.gpu

LENGTHS, NEW = [1, 7, 30, 33, 9, 17], 24
#: slots for as many samples as the largest padded step of the tests: 16 rows of 16 tokens
SLOTS = 256
SIZES = dict(max_sequences=SLOTS, max_step_tokens=512, max_sequence_tokens=128, data_type="fp32")
COUNTS = [5, -1, 0, 20, 3, 1]
GRAMMARS = [
    StructuredOutput("json_schema", json.dumps(KEYS)),
    StructuredOutput("regex", "the ferry leaves at [0-9]{2}:[0-9]{2}, platform [a-c]"),
    StructuredOutput("choice", json.dumps(["the early ferry", "the early train", "never again"])),
    None,
]


@contextmanager
def without_graph(engine: Engine) -> Iterator[list[int]]:
    """Yield the numbers of rows of steps that verify, have no prompt and run without a graph."""
    ran, rows = engine.run, []

    def counting(batch, *arguments, **given):
        if batch.verifies and batch.num_decodes == batch.num_rows:
            rows.append(batch.num_decodes)
        ran(batch, *arguments, **given)

    engine.run = counting  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del engine.run


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_kept_positions_have_the_most_likely_tokens_of_transformers(name: str) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    theirs = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    offline = engine_of(model, keep_logits=False, **SIZES)
    source = drafting(offline, {tuple(p): tokens for p, (tokens, _) in zip(prompts, theirs)}, graphs=True)
    params = [SamplingParams(max_tokens=NEW, top_log_probs=count) for count in COUNTS]
    with without_graph(offline.engine) as eager:
        done = generate(offline, prompts, params, depth=2)
    assert eager == [] and sum(source.counts) > 20
    for found, (tokens, logits), count in zip(done, theirs, COUNTS):
        if count < 0:
            assert found.tokens == tokens and not found.top_log_probs
        else:
            check(found, tokens, logits, count)


def test_every_sampling_rule_keeps_the_models_own_probabilities() -> None:
    """Rows with n-grams run without a graph."""
    model = MODELS["llama"]()
    prompts = prompts_of([*LENGTHS, 4], model.config.vocab_size)
    plain = generate(engine_of(model, keep_logits=False, **SIZES), prompts, SAMPLED)
    offline = engine_of(model, keep_logits=False, **SIZES)
    drafting(offline, {tuple(p): one.tokens for p, one in zip(prompts, plain)}, graphs=True)
    params = [replace(one, top_log_probs=place % 4) for place, one in enumerate(SAMPLED)]
    done = generate(offline, prompts, params, depth=2)
    for place, (prompt, found, wanted) in enumerate(zip(prompts, done, plain)):
        assert found.tokens == wanted.tokens
        check_own(model, prompt, found, place % 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_verified_in_graphs(temperature: float) -> None:
    requests = [
        (
            output,
            sampled(
                seed=seed,
                temperature=temperature,
                max_tokens=90,
                top_log_probs=seed % 3,
                return_log_probs=seed % 2 == 0,
            ),
        )
        for seed, output in enumerate(3 * GRAMMARS)
    ]
    sizes = {"max_sequences": SLOTS, "max_step_tokens": 512, "max_draft_tokens": 15, "device": "cuda"}
    plain = constrained_engine(**sizes)
    wanted = run(plain, requests)
    plain.scheduler.grammars.close()
    offline = constrained_engine(**sizes, speculation="lookup")
    try:
        learning_of(offline).policy.costs = None  # every draft, whatever the steps of this machine cost
        with without_graph(offline.engine) as eager:
            found = run(offline, requests)
        assert_same(found, wanted)
        for one, other in zip(found, wanted):
            assert [(top.rank, top.ids) for top in one.top_log_probs] == [
                (top.rank, top.ids) for top in other.top_log_probs
            ]
        assert accepted(offline) > 60
        graphs = offline.engine.query_graphs
        assert graphs is not None and graphs.replayed > 5
        assert eager == []
    finally:
        offline.scheduler.grammars.close()
