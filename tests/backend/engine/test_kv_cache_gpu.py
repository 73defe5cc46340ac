"""Engines on a GPU with an 8-bit cache against the same engine on the CPU, in fp32: chunks of prompts,
graphs, company, beams, prefixes, conversations, windows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.offline_models import offline_engine, prompts_of, rounding_bound
from tests.backend.engine.test_kv_cache import CHANGE
from tests.backend.engine.test_prompts import TOKENS, ask, random_prefix
from tests.backend.engine.test_session_models import Talk
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES
from tests.prompt_adapters import prefix
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("format", CACHE_FORMATS)
MODELS = {
    "gpt2": lambda: gpt2(head_size=64, heads=3, vocab=331),
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
    "llama, head 128": lambda: llama(
        seed=3, head_size=128, heads=4, kv_heads=1, inner=520, vocab=640, hidden=512
    ),
    "gemma2, a window and a soft cap": FAMILIES["gemma2"],
}
LENGTHS = [1, 2, 7, 30, 33, 9, 40, 5]
NEW = 12
#: prompts shorter than a step, and longer ones, whose later chunks read the cache
STEPS = pytest.mark.parametrize("most", [64, 16], ids=["whole prompts", "chunks"])


def pair(model, format: str, **settings):
    """The engine on the CPU in fp32 and the one on the GPU, whose data_type may be another."""
    defaults = {"max_sequences": 8, "block_tokens": 16, "cache_bytes": 32 << 20, "kv_cache_dtype": format}
    defaults |= settings
    on_cpu = {name: value for name, value in defaults.items() if name != "data_type"}
    return offline_engine(model, **on_cpu), offline_engine(model, device="cuda", **defaults)


@FORMATS
@STEPS
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_fp32_tokens_are_those_of_the_cpu(make, most: int, format: str) -> None:
    """A number close to the middle between two steps may be rounded to either, so a few sequences may differ
    from there on."""
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    engines = pair(model, format, max_step_tokens=most)
    wanted, found = (offline.generate(prompts, SamplingParams(max_tokens=NEW)) for offline in engines)
    errors = [np.abs(a.logits[0] - b.logits[0]).max() for a, b in zip(wanted, found)]
    assert np.median(errors) < 2e-3 * np.std([one.logits[0] for one in wanted])
    same = sum(a.tokens == b.tokens for a, b in zip(wanted, found))
    assert same >= len(prompts) * 3 // 4, [(a.tokens, b.tokens) for a, b in zip(wanted, found)]


@FORMATS
@STEPS
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_16_bit_logits_differ_by_no_more_than_both_round(make, dtype: str, most: int, format: str) -> None:
    """Compares the first tokens, and later ones while the tokens are equal, with graphs and without."""
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW)
    engines = pair(model, format, max_step_tokens=most, data_type=dtype)
    wanted, found = (offline.generate(prompts, params) for offline in engines)
    errors, deviation = [], np.std([one.logits[0] for one in wanted])
    for a, b in zip(wanted, found):
        for step in range(NEW):
            errors.append(((a.logits[step] - b.logits[step]) ** 2).mean())
            if a.tokens[step] != b.tokens[step]:
                break
    assert len(errors) > 2 * len(prompts)
    bound = CHANGE[format] * deviation + rounding_bound(model, prompts, dtype, "cuda")
    assert np.sqrt(np.mean(errors)) < bound
    settings = {"kv_cache_dtype": format, "data_type": dtype, "max_step_tokens": most, "keep_logits": False}
    settings |= {"max_sequences": 8, "block_tokens": 16, "cache_bytes": 32 << 20, "device": "cuda"}
    tokens = [
        [
            one.tokens
            for one in offline_engine(model, cuda_graphs=graphs, **settings).generate(prompts, params)
        ]
        for graphs in (True, False)
    ]
    assert sum(a == b for a, b in zip(*tokens)) >= len(prompts) // 2


@FORMATS
def test_beams_copy_blocks_with_their_scales(format: str) -> None:
    model = MODELS["llama"]()
    prompts = prompts_of([13, 17, 30], model.config.vocab_size, seed=3)
    params = SamplingParams(max_tokens=10, beam_width=3, len_penalty=1.0, beam_pool=True, end_id=5)
    engines = pair(model, format, max_sequences=12, keep_logits=False)
    wanted, found = (
        [[one.tokens for one in group.sequences] for group in offline.generate(prompts, params)]
        for offline in engines
    )
    assert sum(a[0] == b[0] for a, b in zip(wanted, found)) >= 2


@FORMATS
def test_a_prefix_is_rounded_in_the_cache(format: str) -> None:
    model = FAMILIES["gpt2"]()
    vocab, tokens = model.config.vocab_size, []
    prompts = prompts_of([17, 5, 9], vocab, seed=6)
    for offline in pair(model, format):
        cached = random_prefix(offline, 9)
        numbers = [ask(offline, [*range(vocab, vocab + 9), *ids], prefix(cached)) for ids in prompts]
        offline.run()
        tokens.append([offline.generations[number].tokens for number in numbers])
    assert all(len(one) == TOKENS for one in tokens[1])
    assert sum(a == b for a, b in zip(*tokens)) >= 2


@FORMATS
def test_a_round_of_a_conversation_goes_on_from_rounded_keys(format: str) -> None:
    model, answers = MODELS["llama"](), []
    for offline in pair(model, format):
        talk, given = Talk(offline, 1), []
        for new in ([7, 11, 13, 17, 19, 23, 29], [31, 37], [41, 43, 47]):
            talk.submit(new)
            talk.offline.run()
            given.append(talk.take())
        answers.append(given)
    assert answers[0] == answers[1]


@FORMATS
def test_the_same_bytes_hold_more_blocks(format: str) -> None:
    model = MODELS["llama"]()
    exact, narrow = (
        offline_engine(
            model,
            device="cuda",
            data_type="bf16",
            max_sequences=64,
            max_step_tokens=64,
            cache_bytes=1 << 18,
            kv_cache_dtype=dtype,
        ).engine.state.num_blocks  # fmt: skip
        for dtype in ("auto", format)
    )
    assert narrow == (1 << 18) // (2 * 2 * 2 * 8 * (64 + 4)) and exact == (1 << 18) // (2 * 2 * 2 * 8 * 128)
