"""The draft model of a repository: its weights and tokenizer, in a folder of the engine's model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.configuration.engine_config_file import FILE, checkpoint_dir
from tridecode.backend.configuration.engine_config_file import tokenizer_dir as named_tokenizer
from tridecode.backend.configuration.model_config import ModelConfig, check_ranks
from tridecode.backend.engine.device.drafters.draft_loading import DRAFT
from tridecode.backend.models import check_context
from tridecode.backend.text.tokenizer_files import load_tokenizer as read_tokenizer
from tridecode.backend.text.vocabulary_match import vocabulary_difference
from tridecode.backend.weights.draft_files import GLIDE, HEADS, TRAINED
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.kept_quantized import kept_or_dense
from tridecode.converters.sources.quantized import QuantizedSource
from tridecode.converters.tokenizers.files import has_tokenizer, load_tokenizer
from tridecode.model_repo_templates.repository import DRAFT_DIR
from tridecode.model_repo_templates.served import ENGINE_MODEL

_CONTENTS = {DRAFT: "a draft model", HEADS: "one-pass heads", GLIDE: "a GLIDE layer"}


@dataclass(frozen=True)
class Draft:
    """A draft model with the target's number of ids. tokenizer: the draft model's; None: it has none. source:
    its name in errors."""

    source: str
    planned: PlannedConversion
    tokenizer: Tokenizer | None

    @property
    def total_bytes(self) -> int:
        return self.planned.total_bytes

    def write(self, folder: Path, tensor_para_size: int) -> None:
        """Write the weights and tokenizer.json."""
        self.planned.write(folder, tensor_para_size)
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / "tokenizer.json"))

    def check_tokenizer(self, target: Tokenizer) -> None:
        """Raise CheckpointError unless the target has the same vocabulary."""
        if self.tokenizer is None:
            raise CheckpointError(f"--draft {self.source} has no tokenizer; wanted that of the model")
        difference = vocabulary_difference(self.tokenizer, target)
        if difference:
            raise CheckpointError(f"--draft {self.source} has another tokenizer than the model: {difference}")


def with_draft(settings: dict[str, Any], draft: str | Path | None, trained: str) -> dict[str, Any]:
    """Return engine settings with those of a drafter, unless they have them.

    draft: the option --draft; None: not given. trained: kind of its trained drafter; "": a draft model.
    Raises ConfigError for a value of `speculation` or `draft_path` that does not fit.
    """
    kind, path = trained or DRAFT, str(settings.get("draft_path", "none"))
    speculation = str(settings.get("speculation", "off" if draft is None else kind))
    drafter = speculation.removeprefix("lookup+")
    is_drafter, where = drafter in (DRAFT, *TRAINED), "engine settings: parameter"
    if draft is None:
        if is_drafter and path == "none":
            raise ConfigError(f"{where} speculation is {speculation}; wanted --draft with the drafter")
        return settings
    if path not in ("none", DRAFT_DIR):
        raise ConfigError(f"{where} draft_path is {path}; wanted none, because --draft writes it")
    if is_drafter and drafter != kind:
        raise ConfigError(
            f"{where} speculation is {speculation}; wanted {kind}, lookup+{kind}, lookup or off, because "
            f"{draft} has {_CONTENTS[kind]}"
        )
    return {**settings, "speculation": speculation, "draft_path": DRAFT_DIR}


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of transformers' tokenizer, without truncation and padding."""
    found = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    found.no_truncation()
    found.no_padding()
    return found


def plan_draft(
    source: str | Path, target: ModelConfig, tensor_para_size: int, longest: int, console: Console
) -> Draft:
    """Open a draft model: a checkpoint, or a repository of this tool, whose weight files are copied.

    longest: max_sequence_tokens; 0: the target's positions. Raises CheckpointError or ConfigError for what
    cannot draft for `target`.
    """
    path = Path(source)
    engine = path / ENGINE_MODEL
    is_repository = (engine / FILE).is_file()
    checkpoint = open_checkpoint(checkpoint_dir(str(engine)) if is_repository else source)
    planned = plan_conversion(checkpoint, target.weight_dtype, None, None)
    if isinstance(checkpoint.tensors, QuantizedSource):
        planned, _ = kept_or_dense(planned)
    config = planned.config
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"--draft {source} has {config.vocab_size:,} token ids; wanted those of the model, "
            f"{target.vocab_size:,}"
        )
    if config.long_prompt_tokens or target.long_prompt_tokens:
        raise ConfigError(
            f"--draft {source}: one of the two models uses longrope (other rotary factors for long prompts), "
            "which speculation does not support"
        )
    check_ranks(config, tensor_para_size, 1)
    try:
        check_context(config, longest or target.max_positions)
    except ConfigError as error:
        raise ConfigError(f"--draft {source}: {error}") from None
    console.print(
        f"draft model {source}: {config.family}, {config.num_layers} layers of {config.hidden_size}",
        markup=False,
    )
    tokenizer: Tokenizer | None = None
    if is_repository:
        folder = named_tokenizer(engine)
        if folder is not None:
            tokenizer = read_tokenizer(folder, "--draft")
    elif has_tokenizer(checkpoint):
        tokenizer = plain_tokenizer(load_tokenizer(checkpoint))
    return Draft(str(source), planned, tokenizer)
