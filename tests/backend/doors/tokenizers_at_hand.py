"""Small tokenizers of each kind, trained on the spot, so nothing is downloaded."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away",
    "Hello world, hello streaming text! A stop word may come in two pieces.",
    "Ünïcödé and ASCII, naïve café; 東京は日本の首都です。 こんにちは世界",
    "emoji 😀👍🏽 and family 👨‍👩‍👧 and e\u0301 combining",
] * 4


@lru_cache(maxsize=1)
def byte_level() -> Tokenizer:
    """Make a tokenizer like those of GPT-2 and BLOOM: every byte has a token, and a character can span
    tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=False)])
    return tokenizer


_BYTES = [f"<0x{value:02X}>" for value in range(256)]


@lru_cache(maxsize=1)
def sentencepiece_bpe() -> Tokenizer:
    """Make a tokenizer like that of LLaMA: words begin with U+2581, and unknown characters fall back to byte
    tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        special_tokens=["<unk>", "<s>", "</s>", *_BYTES],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = models.BPE(
        vocab=trained.get_vocab(),
        merges=_merges(trained),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


@lru_cache(maxsize=1)
def metaspace_unigram() -> Tokenizer:
    """Make a tokenizer like those of XGLM and T5: Unigram with Metaspace, without byte fallback."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
