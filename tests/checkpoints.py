"""Tiny seeded checkpoints of each family, as transformers saves them, with a tokenizer trained on the spot.

Weights are drawn wide enough that greedy continuations do not repeat themselves, norm weights around 1, and
biases away from 0, so that a wrong layout shows. With the default seeds the two best logits differ by 0.03 or
more at each of 16 steps after the prompts [5], [7, 9, 11] and 20 to 59.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

TINY_VOCAB = 331  # no multiple of 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TEXTS = [
    "The history of the city begins with a small harbour, and the harbour begins with 3 boats.",
    "Il pleut sur la ville; les enfants comptent: 1, 2, 3, 40, 512.",
    "Все счастливые семьи похожи друг на друга.",
    "今日は天気がいいですね。明日は雨です。",
    "Emoji 🙂🚀 and accents: naïve façade, größer, mañana.",
    "def add(a, b):\n    return a + b  # 2 + 2 == 4",
]


def _settle(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw every parameter anew from `seed`; keeps what is tied tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:  # a norm's weight
                parameter.copy_(1.0 + noise * 0.1)
    return model.eval()


def tiny_gpt2(seed: int = 2, **overrides) -> GPT2LMHeadModel:
    """3 heads of 8, hidden 24, 2 layers, 128 positions."""
    settings = {"vocab_size": TINY_VOCAB, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 128}
    config = GPT2Config(bos_token_id=0, eos_token_id=0, **{**settings, **overrides})
    return _settle(GPT2LMHeadModel(config), seed)


def tiny_bloom(seed: int = 8, **overrides) -> BloomForCausalLM:
    """5 heads of 8, hidden 40, 2 layers: the two-part ALiBi rule."""
    settings = {"hidden_size": 40, "n_head": 5, "n_layer": 2, **overrides}
    config = BloomConfig(vocab_size=TINY_VOCAB, bos_token_id=1, eos_token_id=2, **settings)
    return _settle(BloomForCausalLM(config), seed)


def tiny_llama(seed: int = 9, **overrides) -> LlamaForCausalLM:
    """6 heads of 8 over 2 key/value heads, hidden 48, 2 layers, untied."""
    settings = {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **overrides,
    }
    config = LlamaConfig(vocab_size=TINY_VOCAB, bos_token_id=1, eos_token_id=2, **settings)
    return _settle(LlamaForCausalLM(config), seed)


FAMILIES = {"gpt2": tiny_gpt2, "bloom": tiny_bloom, "llama": tiny_llama}


def tiny_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE over TEXTS with at most TINY_VOCAB entries; ids 0 to 2 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save(model: PreTrainedModel, directory: Path, tokenizer: bool = True, **save_options) -> Path:
    """save_pretrained of model and tokenizer, e.g. with max_shard_size. Returns the directory."""
    model.save_pretrained(directory, **save_options)
    if tokenizer:
        tiny_tokenizer(adds_bos=model.config.model_type == "llama").save_pretrained(directory)
    return directory


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, never stopping, and their logits (new_tokens, V), recomputed each step."""
    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(new_tokens):
            rows.append(model(torch.tensor([ids])).logits[0, -1].float())
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)
