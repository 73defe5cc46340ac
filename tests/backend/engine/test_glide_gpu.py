"""Drafts of a GLIDE layer on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.draft_heads import greedy_texts
from tests.backend.engine.glide_layers import PaperGlide, random_glide, trained_glide
from tests.backend.engine.glide_proposals import check_proposals, recorded
from tests.backend.engine.gpu_drafting import LENGTHS, NEW, check_answers, drafting, own_texts
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import generate
from tests.backend.engine.test_engine_gpu import MODELS
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.device.drafters.glide import GlideDrafter
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_keep_their_tokens(name: str, graphs: bool) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    trained = trained_glide(model, greedy_texts(model, prompts, NEW), rate=1e-3)
    check_answers(name, "glide", trained, graphs, GlideDrafter, share=0.1)  # guesses: 1 of 500


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_drafts_are_those_of_the_paper(name: str) -> None:
    model = MODELS[name]()
    trained, prompts = random_glide(model), prompts_of(LENGTHS, model.config.vocab_size)
    offline = drafting(model, "glide", trained=trained, cuda_graphs=False)
    proposals = recorded(offline)
    generate(offline, prompts, SamplingParams(max_tokens=20), depth=2)
    assert check_proposals(proposals, PaperGlide(MODELS[name]().cpu(), trained)) > 50


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_draft_what_single_launches_draft(graphs: bool) -> None:
    """The rows of the device's drafts, step by step, in every padded number of rows."""
    model = MODELS["llama"]()
    trained, prompts = random_glide(model), prompts_of([*LENGTHS, 5, 6], model.config.vocab_size)
    found = []
    for captured in (False, graphs):
        offline = drafting(model, "glide", trained=trained, cuda_graphs=captured)
        drafter, drafts = offline.engine.drafter, []
        propose = drafter.propose

        def propose_and_note(step, propose=propose, drafts=drafts):
            propose(step)
            drafts.append(step.state.drafts[:8, :3].tolist())

        drafter.propose = propose_and_note
        lengths = [SamplingParams(max_tokens=10 + 4 * number) for number in range(len(prompts))]
        generate(offline, prompts, lengths, depth=2)
        found.append(drafts)
    assert len(found[0]) > 20 and found[0] == found[1]


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_sixteen_bit_layers_read_caches_of_16_and_8_bits(kind: str) -> None:
    model = MODELS["llama, head 128"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    settings = {"data_type": "bf16", "kv_cache_dtype": kind}
    trained = trained_glide(model, own_texts(MODELS["llama, head 128"](), prompts, **settings), rate=1e-3)
    offline = drafting(MODELS["llama, head 128"](), "glide", trained=trained, **settings)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth=2)
    assert all(len(one.tokens) == NEW for one in done)
    learning = learning_of(offline)
    assert learning.accepted["glide"] > 0.05 * learning.drafted["glide"] > 5
