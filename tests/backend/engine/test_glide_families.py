"""A GLIDE layer of every kind of attention drafts in the engine what the module that was trained drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.backend.engine.glide_layers import random_glide
from tests.backend.engine.glide_proposals import Proposal, recorded
from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_draft_steps import SIZES, generate
from tests.backend.engine.test_lookup import learning_of
from tests.checkpoints import FAMILIES
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.draft_files import TrainedDraft
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.train_draft.glide import Glide, read_seen
from tridecode.tools.train_draft.texts import Text

SETTINGS = {**SIZES, "max_sequence_tokens": 48}
LENGTHS, NEW = [5, 11, 8], 12
#: interleaved and partial rotation, ALiBi as a bias of keys, windows, softcaps, norms of heads, scaled
#: embeddings, no final norm, a head with a bias
NAMES = [
    "gpt_neox", "gptj", "mpt", "mistral", "gemma2", "gemma3_text", "qwen3", "opt", "phi", "falcon", "xglm",
    "baichuan", "gpt_bigcode", "gpt_neo", "stablelm",
]  # fmt: skip


def drafted_by(
    model, trained: TrainedDraft, prompts: list[list[int]], **settings
) -> tuple[OfflineEngine, list[Proposal], list[list[int]]]:
    settings = {**SETTINGS, **settings}
    offline = offline_engine(model, keep_logits=False, trained=trained, speculation="glide", **settings)
    learning_of(offline).policy.costs = None
    proposals = recorded(offline)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW))
    return offline, proposals, [one.tokens for one in done]


@torch.inference_mode()
def module_logits(model, trained: TrainedDraft, proposals: list[Proposal], **settings) -> list[torch.Tensor]:
    """Return the logits (drafts, V) of the module for each proposal, over the target's states of an engine
    without drafts that has read the text and the drafts."""
    plain = offline_engine(model, keep_logits=False, prefix_cache=False, **{**SETTINGS, **settings})
    state, info = plain.engine.state, trained.info
    glide = Glide(info, state.model.heads[info.layer], state.model.final_norm)
    glide.load_state_dict(trained.tensors)
    texts = [Text(np.array(one.text[: one.place + 1] + one.drafts, np.int32), 1) for one in proposals]
    head = model.get_output_embeddings()
    found = []
    for one, seen in zip(proposals, read_seen(plain, texts, info.layer)):
        places = torch.arange(len(seen.hidden))
        sees = torch.where(places < one.place, places + 1, one.place)[None]
        z = glide(seen.embedded[None].float(), seen.cache[None].float(), sees)[0]
        found.append(head(z[one.place : one.place + len(one.drafts)]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_drafts_what_the_module_drafts(name: str) -> None:
    model = FAMILIES[name]()
    trained, prompts = random_glide(model), prompts_of(LENGTHS, model.config.vocab_size)
    _, proposals, tokens = drafted_by(model, trained, prompts)
    assert tokens == [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    proposals = [one for one in proposals if one.place < len(one.text)]
    assert len(proposals) > 10
    for one, wanted in zip(proposals, module_logits(model, trained, proposals)):
        # a head may scale or cap its logits, which changes no greedy draft
        assert one.drafts == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_eight_bit_cache_is_read_too(kind: str) -> None:
    """The module reads the target's keys as the cache has them, and its own unrounded."""
    model = FAMILIES["llama"]()
    trained, prompts = random_glide(model), prompts_of(LENGTHS, model.config.vocab_size)
    settings = dict(kv_cache_dtype=kind)
    plain = offline_engine(model, keep_logits=False, **SETTINGS, **settings)
    params = SamplingParams(max_tokens=NEW)
    offline, proposals, tokens = drafted_by(model, trained, prompts, **settings)
    assert tokens == [one.tokens for one in generate(plain, prompts, params)]
    assert offline.engine.state.caches[-1].scales is not None
    proposals = [one for one in proposals if one.place < len(one.text)]
    wanted = module_logits(model, trained, proposals, **settings)
    right = [a == b for one, logits in zip(proposals, wanted) for a, b in zip(one.drafts, logits.argmax(-1))]
    assert len(right) > 60 and np.mean(right) > (0.9 if kind == "int8" else 0.6), np.mean(right)
