"""Forced drafts on a GPU, in CUDA graphs, one step ahead of the counts: the tokens of transformers."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from tests.backend.engine.draft_source import ForcedDrafts
from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tridecode.backend.engine.device.preparation import capture_query_graphs
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [1, 7, 30, 33, 9, 17]
NEW = 24
SIZES = dict(max_sequences=64, max_step_tokens=128, max_sequence_tokens=128)


def drafting(offline: OfflineEngine, answers, graphs: bool) -> ForcedDrafts:
    source = ForcedDrafts(answers, offline.model_config.vocab_size, needs_token=False)
    offline.scheduler.planner.use_drafter(source)
    offline.engine.drafter = source
    if graphs:
        capture_query_graphs(offline.engine, 16)
    return source


def agreed(found: list[int], wanted: list[int]) -> int:
    """Tokens before the first other one."""
    return next((i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), NEW)


def rounding_error(done: list[Generation], wanted: list[tuple[list[int], np.ndarray]]) -> float:
    """The largest difference of a run's logits from transformers', up to each row's first other token."""
    errors = []
    for one, (tokens, logits) in zip(done, wanted, strict=True):
        steps = min(agreed(one.tokens, tokens) + 1, NEW)
        errors.append(np.abs(np.stack(one.logits[:steps]) - logits[:steps]).max())
    return float(max(errors))


def assert_same_but_ties(found: list[int], wanted: list[int], logits: np.ndarray, error: float) -> None:
    """The first other token is one that logits with an error of `error` can choose."""
    step = agreed(found, wanted)
    if step < NEW:
        gap = float(logits[step, wanted[step]] - logits[step, found[step]])
        assert gap <= 4 * error, (step, found[step], wanted[step], gap, error)


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("fp32", "auto"), ("fp16", "auto"), ("bf16", "auto"), ("bf16", "int8"), ("fp16", "fp8")],
)
def test_forced_rows_in_graphs_give_transformers_tokens(name: str, dtype: str, cache: str) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    offline = gpu_engine(model, keep_logits=False, data_type=dtype, kv_cache_dtype=cache, **SIZES)
    answers = {tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, wanted)}
    source = drafting(offline, answers, graphs=True)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth=2)
    plain = gpu_engine(model, data_type=dtype, kv_cache_dtype=cache, **SIZES)
    alone = generate(plain, prompts, SamplingParams(max_tokens=NEW))
    error = rounding_error(alone, wanted)
    for one, (tokens, logits) in zip(done, wanted, strict=True):
        assert_same_but_ties(one.tokens, tokens, logits, error)
    steps, steps_alone = (
        [agreed(one.tokens, tokens) for one, (tokens, _) in zip(run, wanted, strict=True)]
        for run in (done, alone)
    )
    if dtype == "fp32":
        assert steps == [NEW] * len(prompts)
    # the middle of all prompts: one that a tie ends early, or does not, says nothing
    assert median(steps) >= median(steps_alone) / 2, (steps, steps_alone)
    assert sum(source.counts) > 20 and source.ahead > 5
    graphs = offline.engine.query_graphs
    assert graphs is not None and graphs.replayed > 3


def test_sampled_rows_in_graphs_and_out_of_them_are_those_of_one_token_a_step() -> None:
    model = MODELS["llama"]()
    prompts = prompts_of(LENGTHS[:5], model.config.vocab_size)
    plain = generate(gpu_engine(model, keep_logits=False, data_type="fp32", **SIZES), prompts, SAMPLED)
    answers = {tuple(prompt): one.tokens for prompt, one in zip(prompts, plain)}
    for graphs in (True, False):
        offline = gpu_engine(model, keep_logits=False, data_type="fp32", **SIZES)
        drafting(offline, answers, graphs)
        done = generate(offline, prompts, SAMPLED, depth=2)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        for one, other in zip(done, plain, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
