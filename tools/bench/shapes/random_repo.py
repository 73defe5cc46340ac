"""Builds a model repository without a checkpoint: random weights of a real shape, a toy tokenizer, all
doors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family, model_config_ini
from tridecode.model_repo_templates.repository import (
    ENGINE_MODEL,
    TOKENIZER_DIR,
    engine_texts,
    repository_models,
    write_models,
)


def toy_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a byte-level tokenizer: one token per byte in the usual order, and a filler word for each other
    id, so that every id of the vocabulary decodes. vocab_size: 256 or more."""
    if vocab_size < 256:
        raise ConfigError(f"a byte-level vocabulary of {vocab_size} ids; wanted 256 or more")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for number in range(len(alphabet), vocab_size):
        vocabulary[f"Ġt{number}"] = number  # Ġ stands for a space in byte-level vocabularies
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_random_repository(
    directory: Path, model: ModelConfig, settings: Mapping[str, object] | None = None
) -> Path:
    """Write a repository whose engine draws random weights at its start. Returns `directory`.

    settings: EngineConfig parameters, such as data_type and tensor_para_size. Raises ConfigError for an
    unknown one.
    """
    texts = engine_texts({**(settings or {}), "weights": "random"}, "engine settings")
    weights = directory / ENGINE_MODEL / "1" / f"{texts['tensor_para_size']}-gpu"
    weights.mkdir(parents=True)
    ini = model_config_ini(model, int(texts["tensor_para_size"]))
    (weights / "config.ini").write_text(ini, encoding="utf-8")
    write_models(
        directory,
        repository_models(),
        engine=texts,
        model_type=family(model.family).model_type,
        checkpoint_path=weights.name,
        pad_id=max(model.end_id, 0),
        stop_ids="",
    )
    (directory / TOKENIZER_DIR).mkdir(parents=True)
    toy_tokenizer(model.vocab_size).save(str(directory / TOKENIZER_DIR / "tokenizer.json"))
    return directory
