"""One-pass heads of a tiny model, trained on texts that transformers writes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from tests.backend.engine.offline_models import hf_greedy
from tridecode.backend.weights.draft_files import FORMAT, HEADS, DraftInfo, TrainedDraft
from tridecode.tools.train_draft.heads import Heads
from tridecode.tools.train_draft.texts import Text
from tridecode.tools.train_draft.training import Plan, states_of, train_heads


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, text: Text) -> torch.Tensor:
    ids = torch.from_numpy(text.ids).long()[None]
    return model(ids, output_hidden_states=True).hidden_states[-1][0].clone()


def greedy_texts(model: torch.nn.Module, prompts: list[list[int]], new: int) -> list[Text]:
    answers = [hf_greedy(model, prompt, new)[0] for prompt in prompts]
    return [Text(np.array(one + more, np.int32), len(one)) for one, more in zip(prompts, answers)]


def trained_heads(
    model: torch.nn.Module, texts: list[Text], depth: int = 3, epochs: int = 150
) -> tuple[Heads, TrainedDraft]:
    """Return heads that are overfitted to these texts."""
    table = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    states = states_of(texts, [hidden_states(model, text) for text in texts])
    plan = Plan(depth, epochs=epochs, batch=64, rate=3e-3)
    heads = train_heads(states, table, head, None, plan, torch.device("cpu"))
    size, vocab = table.shape[1], table.shape[0]
    info = DraftInfo(FORMAT, HEADS, model.config.model_type, size, vocab, depth, plan.width_of(size))
    return heads, TrainedDraft(info, heads.state_dict())


@lru_cache(maxsize=4)
def known_model(make, prompts: tuple[tuple[int, ...], ...], new: int):
    """Return a model, its greedy answers to prompts, and heads that are overfitted to them."""
    model = make()
    texts = greedy_texts(model, [list(prompt) for prompt in prompts], new)
    return model, texts, *trained_heads(model, texts)
