"""The checkpoint's tokenizer as files that a door can use: it has the tokenizers library, not transformers.

What is written is the tokenizer that transformers runs: BOS and EOS are added by its post-processor, or not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tridecode.backend.errors import CheckpointError, UnsupportedError
from tridecode.converters.checkpoint import Checkpoint

#: any of these sets makes a tokenizer
_SOURCES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
#: copied as they are where the source has them
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
#: llama.cpp's splits of byte-level vocabularies that come out right: by transformers, and "smollm" by us
_GGUF_SPLITS = ("gpt-2", "gpt2", "llama-bpe", "llama3", "llama-v3", "smollm")
#: several scripts, digits, blanks, code and emoji: what a wrong normaliser or split shows on
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "In 2024, 1,234 of 56789 people paid $3.50 (≈ 70%).",
    "  two leading blanks,\ttab,\n\nnew lines  and a trailing blank ",
    "Él llegó tarde; größer, naïve, œuvre, Čeština.",
    "Все счастливые семьи похожи друг на друга.",
    "今日は天気がいいですね。明日は雨です。",
    "حسنًا، لنبدأ الآن. שלום עולם",
    "Emoji 🙂🚀 and a family 👩‍👩‍👧.",
    "for i in range(10):\n    print(f'{i:>3}')  # 100%",
    "",
)


def load_tokenizer(checkpoint: Checkpoint, override: Path | None = None) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of a checkpoint, or of the directory `override`.

    Raises CheckpointError where the files are missing or transformers cannot read them, UnsupportedError for
    a GGUF whose way of splitting text cannot be rebuilt.
    """
    if override is not None or not checkpoint.is_gguf:
        directory = override or checkpoint.path
        if not any(all((directory / name).is_file() for name in names) for names in _SOURCES):
            wanted = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
            raise CheckpointError(f"{directory} has no tokenizer; wanted {wanted}")
        return _load(directory)
    kind, split = (checkpoint.gguf_fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and split not in _GGUF_SPLITS:
        raise UnsupportedError(
            f"{checkpoint.path} has tokenizer.ggml.pre = {split}, which cannot be rebuilt; name the folder "
            "of the original tokenizer (tokenizer=)"
        )
    tokenizer = _load(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    if kind == "gpt2" and split == "smollm":
        # transformers drops this split: every digit is a token of its own
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _load(directory: Path, **kwargs) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, **kwargs)
    except Exception as error:  # transformers and tokenizers raise bare Exception among others
        raise CheckpointError(f"transformers cannot read the tokenizer of {directory}: {error}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"the tokenizer of {directory} has no form that the tokenizers library runs")
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path | None, directory: Path) -> Tokenizer:
    """Write tokenizer.json and its companions into `directory`; returns what a door will load.

    source: the directory whose companion files are copied; None (GGUF): transformers writes them. Raises
    CheckpointError where the written tokenizer and transformers' split a probe differently.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if source is None:
        tokenizer.save_pretrained(directory)
    else:
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    written = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    written.no_truncation()  # transformers sets both for each call; a door must never cut or pad a prompt
    written.no_padding()
    written.save(str(directory / "tokenizer.json"))
    for probe in PROBES:
        wanted, found = tokenizer(probe).input_ids, written.encode(probe).ids
        if found != wanted:
            raise CheckpointError(f"tokenizer.json splits {probe!r} into {found}; transformers into {wanted}")
    return written


def vocabulary_size(tokenizer: Tokenizer, with_added_tokens: bool = True) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab(with_added_tokens=with_added_tokens).values()) + 1
