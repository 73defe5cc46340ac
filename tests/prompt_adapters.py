"""Prompt-learning adapters of the tiny checkpoints, made, saved and run by the real `peft`, and
transformers' answers to embeddings instead of tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import DynamicCache, PreTrainedModel

from tridecode.backend.wire.prompt_learning import LearnedPrompt
from tridecode.backend.wire.prompt_tables import TABLE_DTYPES

KINDS = {"prompt": PromptTuningConfig, "p": PromptEncoderConfig, "prefix": PrefixTuningConfig}


def make_prompt(
    model: PreTrainedModel, directory: Path, kind: str, length: int, seed: int, scale: float = 0.5, **settings
) -> PeftModel:
    """Save an adapter of a kind of KINDS as PEFT does, with weights that change the tokens. Returns PEFT's
    model."""
    config = KINDS[kind](task_type=TaskType.CAUSAL_LM, num_virtual_tokens=length, **settings)
    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "prompt_encoder" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    adapted.save_pretrained(str(directory))
    return adapted.eval()


@torch.inference_mode()
def greedy_peft(model: PeftModel, prompt: list[int], new_tokens: int) -> tuple[list[int], np.ndarray]:
    """Tokens and (new_tokens, V) logits of PEFT's model, one forward of the whole sequence per token."""
    ids, logits = list(prompt), []
    for _ in range(new_tokens):
        logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().numpy())
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], np.stack(logits)


@torch.inference_mode()
def greedy_embedded(
    model: PreTrainedModel, prompt: list[int], table: torch.Tensor, vocab_size: int, new_tokens: int
) -> tuple[list[int], np.ndarray]:
    """Like greedy_peft, with inputs_embeds of transformers' model: id vocab_size + i is row i of table."""
    embedding, ids, logits = model.get_input_embeddings(), list(prompt), []
    for _ in range(new_tokens):
        found = torch.tensor(ids)
        embedded = embedding(found.where(found < vocab_size, 0)).clone()
        virtual = found >= vocab_size
        embedded[virtual] = table[found[virtual] - vocab_size].to(embedded)
        logits.append(model(inputs_embeds=embedded[None], use_cache=False).logits[0, -1].float().numpy())
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], np.stack(logits)


def prefix_table(model: PeftModel) -> torch.Tensor:
    """(length, layers, 2, K, D): the keys and values that PEFT puts before the prompt."""
    rows = model.get_prompt_embedding_to_save("default")
    config = model.peft_config["default"]
    heads = config.num_attention_heads
    return rows.view(len(rows), config.num_layers, 2, heads, config.token_dim // heads).detach()


@torch.inference_mode()
def greedy_prefixed(
    model: PreTrainedModel, prompt: list[int], table: torch.Tensor, new_tokens: int
) -> tuple[list[int], np.ndarray]:
    """Like greedy_peft, with a cache that begins with table (length, layers, 2, K, D)."""
    ids, logits = list(prompt), []
    for _ in range(new_tokens):
        cache = DynamicCache(config=model.config)
        for layer in range(table.shape[1]):
            keys, values = table[:, layer].permute(1, 2, 0, 3)[:, None]
            cache.update(keys.contiguous(), values.contiguous(), layer)
        mask = torch.ones(1, len(table) + len(ids), dtype=torch.long)
        answer = model(torch.tensor([ids]), past_key_values=cache, attention_mask=mask)
        logits.append(answer.logits[0, -1].float().numpy())
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], np.stack(logits)


def soft(table: torch.Tensor, dtype: str = "fp32") -> LearnedPrompt:
    """The engine's request for a table (rows, C) of embeddings."""
    return LearnedPrompt(rows=len(table), dtype=dtype, values=_bytes(table, dtype))


def prefix(table: torch.Tensor, dtype: str = "fp32") -> LearnedPrompt:
    """The engine's request for a prefix (rows, layers, 2, K, D)."""
    return LearnedPrompt(is_prefix=True, rows=len(table), dtype=dtype, values=_bytes(table, dtype))


def _bytes(table: torch.Tensor, dtype: str) -> bytes:
    return table.numpy().astype(TABLE_DTYPES[dtype]).tobytes()
