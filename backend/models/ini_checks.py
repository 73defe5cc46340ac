"""Refuses keys of config.ini that are misspelt, or that the model's family ignores. No torch."""

from __future__ import annotations

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.ini_keys import KEYS, LOCAL, NOT_READ, misspelt


def refuse_misspelt(section: IniSection) -> None:
    """Raise ConfigError for a key that resembles one of KEYS that the section lacks.

    Other unknown keys are ignored, as FasterTransformer does: some of its converters wrote their own options
    and all of Hugging Face's config into the section.
    """
    absent = [key for key in (*KEYS, *NOT_READ) if key not in section.items]
    for name in section.items:
        meant = misspelt(name.removeprefix(LOCAL), absent)
        if meant:
            raise ConfigError(
                f"{section.path}: [{section.name}] {name[:64]} is unknown; did you mean {meant}?"
            )


#: keys that FasterTransformer's converters also wrote for models that ignore them
_THEIRS = {
    "model_name", "model_variant", "max_pos_seq_len", "layernorm_eps", "layernorm_type", "activation_type",
    "has_positional_encoding", "has_pre_decoder_layernorm", "has_post_decoder_layernorm", "has_adapters",
    "use_attention_linear_bias", "use_gptj_residual", "rotary_embedding",
}  # fmt: skip


def refuse_unread(section: IniSection, title: str) -> None:
    """Raise ConfigError for one of our keys that changes other families but not this one."""
    for name, text in section.items.items():
        key = name.removeprefix(LOCAL)
        if text.strip().lower() in ("", "false", "no", "off", "0", "0.0", "none"):
            continue  # describes the network
        if key in KEYS and key not in _THEIRS and name not in section.asked:
            raise section.wrong(name, text[:80], f"no such key: {title} does not read it")
