"""Small GGUF files with a vocabulary, written with llama.cpp's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
#: texts that reveal a wrong split, prefix or merge
HARD_TEXTS = (
    "hello world", " hello", "hello ", "  two  blanks   three", "a\n\nb \n c\t\td\r\ne", "\n", " ", "",
    "I'M here, it's 'LL we'Re don't", "1234567 12 3.14159 ½ ٣٤٥", "x=1+2;y<=3|z^2 `code` ~ $5 100%",
    "camelCase HTTPServer ÄÖÜ straße ΑΒΓ абв", "日本語のテキスト。中文 한국어 ไทย हिन्दी",
    "e\u0301 naïve \u00a0nbsp \u3000wide", "🙂🚀👩‍👩‍👧 … — “quoted” (a|b) [c]", "a_b-c/d\\e ▁x",
    "if x:\n        return  y  # done!!!\n\n\n    pass", "don't<|user|> stop<|end|> now", "<|end|><|user|>",
    "<s>one</s> two",
)  # fmt: skip


def _corpus() -> list[str]:
    """Parts of the texts in several orders: merges lead across words, but none makes a whole text."""
    parts = [text[at : at + 7] for text in HARD_TEXTS for at in range(0, len(text), 3)]
    return [part for part in parts if not set(part) & set("<>")]


@cache
def byte_level_bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges, trained on whole texts: merges lead across words, so that every split matters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    held = json.loads(tokenizer.to_str())["model"]
    return sorted(held["vocab"], key=held["vocab"].__getitem__), [" ".join(pair) for pair in held["merges"]]


@cache
def sentencepiece_bpe() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a sentencepiece BPE has them: <unk>, <s>, </s>, bytes, pieces."""
    tokenizer = Tokenizer(models.BPE())
    texts = [text.replace(" ", "▁") for text in _corpus()]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    held = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = sorted(held, key=held.__getitem__)
    pieces = [piece for piece in pieces if not set(piece) & set("ÄÖÜ🚀")]  # bytes stand for these
    merged = [piece for piece in pieces if len(piece) > 1]
    single = [piece for piece in pieces if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    scores = [0.0] * 259 + [-float(number) for number in range(len(merged) + len(single))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(single))]
    return tokens, scores, types


def write_vocabulary(path: Path, keys: Mapping[str, Any], architecture: str = "llama") -> Path:
    """A file of a tiny model with random weights. keys: those of tokenizer.ggml, without this prefix, and
    whole ones."""
    rng, size, hidden = np.random.default_rng(0), len(keys["tokens"]), 32
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(size)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    add_keys(writer, keys)
    shapes = {"token_embd": (size, hidden), "output": (size, hidden), "blk.0.attn_q": (32, hidden)}
    shapes |= {"blk.0.attn_k": (16, hidden), "blk.0.attn_v": (16, hidden), "blk.0.attn_output": (hidden, 32)}
    shapes |= {"blk.0.ffn_gate": (48, hidden), "blk.0.ffn_up": (48, hidden), "blk.0.ffn_down": (hidden, 48)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) * 0.3).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """keys: those of tokenizer.ggml, without this prefix, and whole ones."""
    for key, value in keys.items():
        _add(writer, key if "." in key else f"tokenizer.ggml.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def bpe_keys(pre: str | None = None, **more: Any) -> dict[str, Any]:
    """Keys of a byte-level BPE with some tokens that are taken whole."""
    tokens, merges = byte_level_bpe()
    special: Sequence[str] = ("<|begin|>", "<|end|>", "<|user|>", "<|im_end|>")
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED, NORMAL]
    keys = {"model": "gpt2", "tokens": [*tokens, *special], "token_type": types, "merges": merges}
    keys |= {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1}
    return {**keys, **({} if pre is None else {"pre": pre}), **more}


def sentencepiece_keys(**more: Any) -> dict[str, Any]:
    """Keys of a sentencepiece BPE with some tokens that are taken whole."""
    tokens, scores, types = sentencepiece_bpe()
    keys = {"model": "llama", "tokens": [*tokens, "<|user|>", "<|end|>", "  ", "<|endoftext|>"]}
    keys |= {"scores": [*scores, -1000.0, -1000.0, -1000.0, -1000.0]}
    return {**keys, "token_type": [*types, USER_DEFINED, CONTROL, USER_DEFINED, CONTROL], **more}
