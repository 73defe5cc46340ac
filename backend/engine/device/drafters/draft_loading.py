"""Reads the draft model of an engine's settings and refuses one that cannot draft for the served model."""

from __future__ import annotations

from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig, check_ranks
from tridecode.backend.models import check_context, read_model_config
from tridecode.backend.text.vocabulary_match import check_same_vocabulary

#: value of `speculation` for a draft model
DRAFT = "draft"


def draft_config(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """Return the config of the draft model; None if none is configured.

    config: max_sequence_tokens may be unresolved. Raises ConfigError for a missing folder or file, another
    vocabulary size, fewer positions, and settings that exclude a draft model.
    """
    if config.drafter != DRAFT:
        return None
    wanted = f"parameter speculation is {config.speculation}"
    if config.draft_path == "none":
        raise ConfigError(
            f"{wanted} and draft_path none; wanted the folder of a draft model, "
            "which `tridecode build-repo --draft` writes"
        )
    folder = Path(config.draft_path)
    where = f"parameter draft_path names {folder}"
    if not (folder / "config.ini").is_file():
        raise ConfigError(f"{where}, which has no config.ini; wanted a weight directory")
    if config.pipeline_para_size > 1:
        raise ConfigError(
            f"{wanted} with pipeline_para_size {config.pipeline_para_size}; wanted "
            "1: the stages of a pipeline do not share a draft model"
        )
    draft = read_model_config(folder)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{where}, a model with {draft.vocab_size} token ids; wanted those of the served model, "
            f"{model.vocab_size}"
        )
    for one, name in ((model, "the served model"), (draft, f"the draft model of {folder}")):
        if one.long_prompt_tokens:
            raise ConfigError(
                f"{wanted}, and {name} rotates long prompts with other factors "
                "(longrope); wanted speculation = off"
            )
    check_ranks(draft, config.tensor_para_size, 1)
    try:
        check_context(draft, config.max_sequence_tokens or model.max_positions)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return draft


def check_draft_tokenizer(config: EngineConfig, tokenizer: Path | None) -> None:
    """Raise ConfigError if a draft model is configured and lacks the served model's tokenizer.

    tokenizer: folder of the served model's; None: requests have token ids, so there is nothing to compare.
    """
    if config.drafter != DRAFT or config.draft_path == "none" or tokenizer is None:
        return
    if (tokenizer / "tokenizer.json").is_file():
        check_same_vocabulary(Path(config.draft_path), tokenizer, "draft_path")
