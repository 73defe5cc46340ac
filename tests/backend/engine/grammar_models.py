"""Engines with a tokenizer, and schemas, for the tests of structured output."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.backend.engine.offline_models import offline_engine
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams

END, OTHER_END = 2, 0
#: more than the tokenizer has: Megatron and others pad
PADDED_VOCAB = 640


@functools.cache
def tokenizer_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="grammar-tokenizer-"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def random_model(vocab_size: int = PADDED_VOCAB, layers: int = 1) -> GPT2LMHeadModel:
    """Return a model whose tokens are about equally likely at temperature 1."""
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=512,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        bos_token_id=1,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(config).eval()


def constrained_engine(**settings: Any) -> OfflineEngine:
    """A random model whose tokenizer is tiny_tokenizer()."""
    settings = {"max_sequences": 8, "max_sequence_tokens": 512, "max_step_tokens": 64, **settings}
    return offline_engine(random_model(), keep_logits=False, tokenizer_dir=tokenizer_folder(), **settings)


def sampled(**values: Any) -> SamplingParams:
    """Parameters of a draw from all tokens."""
    wanted = {"max_tokens": 200, "top_k": 0, "end_id": END, "more_end_ids": [OTHER_END], **values}
    return SamplingParams(**wanted)
