"""Trains a draft model that consists of some of the target's layers, its embedding and its head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tridecode.backend.base.errors import UnsupportedError
from tridecode.converters.sources import Checkpoint
from tridecode.converters.tokenizers.files import has_tokenizer, load_tokenizer, save_tokenizer
from tridecode.tools.train_draft.texts import Text
from tridecode.tools.train_draft.training import Plan, Vocabulary, autocast, backward_rows, train_in_groups

_ROWS = 512  # positions whose logits are computed together


def cut_model(checkpoint: Checkpoint, layers: int) -> PreTrainedModel:
    """Return transformers' model of a checkpoint with only `layers` of its layers, in float32: its first ones
    and its last one. Embedding and head are those of the checkpoint and do not learn.

    Raises CheckpointError or UnsupportedError for a model without a list of layers, or with fewer of them.
    """
    model = checkpoint.reference_model(torch.float32)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{checkpoint.path}: transformers has no model for it; wanted --kind heads")
    count = model.config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1 or layers >= count:
        raise UnsupportedError(
            f"{checkpoint.path} has {count} layers in {len(found)} lists; wanted one list of more than "
            f"--layers {layers}"
        )
    name, module = found[0]
    kept = sorted({*range(layers - 1), count - 1})
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], torch.nn.ModuleList([module[index] for index in kept]))
    _renumber(model, kept, count)
    for one in (model.get_input_embeddings(), model.get_output_embeddings()):
        one.requires_grad_(False)
    return model.train(False)


def _renumber(model: PreTrainedModel, kept: list[int], count: int) -> None:
    """Give the layers their new numbers, and cut the lists of the config that have an entry per layer."""
    config = model.config
    for name, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    numbers = {index: number for number, index in enumerate(kept)}
    for module in model.modules():
        for name in ("layer_idx", "layer_id"):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, numbers[getattr(module, name)])


def train_model(
    model: PreTrainedModel,
    texts: Sequence[Text],
    states: Sequence[Tensor],
    plan: Plan,
    device: torch.device,
) -> None:
    """Train a model in place on the answers of the texts, about plan.batch positions per step.

    states: hidden states of the target, (tokens, C) for each text.
    """
    torch.manual_seed(plan.seed)
    torch.nn.Module.to(model, device)
    every = torch.cat([torch.from_numpy(text.ids).long() for text in texts])
    head = model.get_output_embeddings()
    vocabulary = Vocabulary(every, head.weight.detach(), getattr(head, "bias", None))

    def backward(group: list[int]) -> None:
        _step(model, [(texts[index], states[index]) for index in group], vocabulary, device)

    learning = [one for one in model.parameters() if one.requires_grad]
    train_in_groups(learning, [len(text.ids) for text in texts], plan, backward)


def _step(
    model: PreTrainedModel,
    texts: Sequence[tuple[Text, Tensor]],
    vocabulary: Vocabulary,
    device: torch.device,
) -> None:
    """Accumulate the gradients of a batch of texts, over the tokens of the answers."""
    longest = max(len(text.ids) for text, _ in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, (text, _) in enumerate(texts):
        ids[row, : len(text.ids)] = torch.from_numpy(text.ids)
    # positions whose states predict the tokens of the answers
    rows = [np.arange(text.prompt - 1, len(text.ids) - 1) for text, _ in texts]
    places = torch.from_numpy(np.concatenate([row * longest + one for row, one in enumerate(rows)]))
    target = torch.cat([states[one] for (_, states), one in zip(texts, rows)])
    with autocast(device):
        hidden = _last_hidden(model, ids.to(device))
    backward_rows(hidden, places.to(device), target.to(device), vocabulary)


def _last_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the inputs of the head, (rows, tokens, C). Attention is causal, so padding after a text has no
    effect on it."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def model_drafts(model: PreTrainedModel, text: Text, depth: int) -> Tensor:
    """Return the drafts after each newest token of a text's answer, (n, depth).

    Draft j is predicted from the text up to draft j - 1, not from earlier drafts. Both agree as long as all
    earlier drafts equal the text, and drafts after a wrong one do not count.
    """
    ids = torch.from_numpy(text.ids).long()
    device = model.device
    hidden = _last_hidden(model, ids[None].to(device))[0]
    best = torch.cat([model.get_output_embeddings()(part).argmax(-1) for part in hidden.split(_ROWS)]).cpu()
    newest = torch.arange(text.prompt, len(ids) - 1)
    return best[(newest[:, None] + torch.arange(depth)).clamp(max=len(ids) - 1)]


def save_model(model: PreTrainedModel, checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write the model as transformers saves it, with the tokenizer of the checkpoint."""
    saved = copy.deepcopy(model).cpu()
    torch.nn.Module.to(saved, dtype)
    saved.save_pretrained(folder)
    if has_tokenizer(checkpoint):
        save_tokenizer(load_tokenizer(checkpoint), checkpoint.tokenizer_dir, folder)
