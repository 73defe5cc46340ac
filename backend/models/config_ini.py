"""config.ini: the INI reader, and the keys that several families share. No torch.

The spellings are those of FasterTransformer's `ParallelGptTritonModel.cc`, also in sections of ours.
"""

from __future__ import annotations

import configparser
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable

from tridecode.backend.config import DEFAULT_MAX_POSITIONS, DTYPES, ModelConfig, RopeConfig, parse_flag
from tridecode.backend.errors import ConfigError, UnsupportedError

#: more layers in a config.ini mean a damaged file; the limit bounds the lists of tensors made from it
MAX_LAYERS = 4096
ROPE_SCALINGS = {name: name for name in ("default", "linear", "dynamic", "yarn", "longrope", "llama3")}
#: activation_type -> ModelConfig.activation; FasterTransformer's Gelu is the tanh form, gelu_erf is ours
ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_erf": "gelu", "relu": "relu", "silu": "silu"}
ACTIVATION_NAMES = {"gelu_tanh": "Gelu", "gelu": "gelu_erf", "relu": "Relu", "silu": "Silu"}
#: key -> field of ModelConfig
_SIZES = {
    "head_num": "num_heads",
    "size_per_head": "head_size",
    "inter_size": "mlp_size",
    "vocab_size": "vocab_size",
}
#: key -> field of RopeConfig
_ROPE_NUMBERS = {
    "rope_theta": "theta",
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
}
_ROPE_FLAGS = {
    "rope_truncate": "truncate",
    "rope_interleaved": "interleaved",
    "rope_recompute": "recompute",
}
_ROPE_LISTS = {"rope_short_factors": "short_factors", "rope_long_factors": "long_factors"}


class IniSection:
    """One section of a config.ini in the dialect of INIReader.h. Errors name file, section and key.

    A default of None makes a key mandatory. Raises ConfigError for a missing key and a value of another type.
    """

    def __init__(self, path: Path, name: str, items: dict[str, str]):
        self.path, self.name, self.items = path, name, items

    def with_prefix(self, prefix: str) -> IniSection:
        """The keys that begin with `prefix`, without it."""
        own = {key[len(prefix) :]: text for key, text in self.items.items() if key.startswith(prefix)}
        return IniSection(self.path, self.name, own)

    def _convert(self, key: str, convert: Callable, wanted: str, default):
        text = self.items.get(key.lower())
        if text is None:
            if default is None:
                raise ConfigError(
                    f"{self.path}: section [{self.name}] has no {key}; wanted {key} = <{wanted}>"
                )
            return default
        try:
            return convert(text.strip())
        except ValueError:
            found = f"[{self.name}] {key} = {text[:80]!r}"
            raise ConfigError(f"{self.path}: {found}; wanted {wanted}") from None

    def integer(
        self,
        key: str,
        default: int | None = None,
        minimum: int | None = None,
        maximum: int = 2**31 - 1,
    ) -> int:
        value = self._convert(key, lambda text: int(text, 0), "a whole number", default)
        if minimum is not None and value < minimum:
            raise ConfigError(f"{self.path}: [{self.name}] {key} = {value}; wanted {minimum} or more")
        if value > maximum:
            raise ConfigError(f"{self.path}: [{self.name}] {key} = {value}; wanted {maximum} or less")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self._convert(key, _finite, "a number (finite)", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._convert(key, str, "a text", default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._convert(key, parse_flag, "true or false", default)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Numbers with blanks or commas between them: `length` of them, or none."""
        text = self.text(key, "")
        try:
            values = tuple(_finite(part) for part in text.replace(",", " ").split())
        except ValueError:
            values = (math.nan,)
        if values and (len(values) != length or math.isnan(values[0])):
            found = f"[{self.name}] {key} = {text[:80]!r}"
            raise ConfigError(f"{self.path}: {found}; wanted {length} numbers with blanks between them")
        return values

    def integers(self, key: str, length: int, minimum: int = 0) -> tuple[int, ...]:
        """Whole numbers with blanks or commas between them: `length` of them, or none."""
        values = self.numbers(key, length)
        if any(value != int(value) or not minimum <= value < 2**31 for value in values):
            found = f"[{self.name}] {key} = {self.text(key, '')[:80]!r}"
            raise ConfigError(f"{self.path}: {found}; wanted whole numbers of {minimum} or more")
        return tuple(map(int, values))

    def choice(self, key: str, default: str, values: Mapping[str, str]) -> str:
        """The value that `values` has for the key's text, in any case. UnsupportedError for another text."""
        text = self.text(key, default).lower()
        if text not in values:
            raise self._unsupported(f"{key} = {text}", ", ".join(values))
        return values[text]

    def demand(self, key: str, value: bool) -> None:
        """Raises UnsupportedError where the flag is not `value`, its default."""
        if self.flag(key, value) is not value:
            raise self._unsupported(f"{key} = {str(not value).lower()}", str(value).lower())

    def _unsupported(self, found: str, supported: str) -> UnsupportedError:
        return UnsupportedError(f"{self.path}: [{self.name}] {found}; this version runs {supported}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def read_ini(path: Path) -> dict[str, IniSection]:
    """Sections of an INI file by lower-case name. Raises ConfigError if it is missing or cannot be parsed."""
    parser = configparser.ConfigParser(
        strict=False,
        interpolation=None,
        delimiters=("=", ":"),
        comment_prefixes=("#", ";"),
        inline_comment_prefixes=(";",),
    )
    try:
        parser.read_string(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a weight directory has a config.ini") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid INI file: {' '.join(str(error).split())}") from None
    return {name.lower(): IniSection(path, name, dict(parser[name])) for name in parser.sections()}


def read_common(section: IniSection, max_positions: int | None = DEFAULT_MAX_POSITIONS) -> dict[str, Any]:
    """The fields of ModelConfig that every family reads alike. hidden_size: num_heads * head_size.

    max_positions: the value without a max_pos_seq_len; None: the key is mandatory.
    """
    dtype_text = section.text("weight_data_type").lower()
    dtype = next((known for known in DTYPES if known in dtype_text), None)
    if dtype is None:
        raise ConfigError(
            f"{section.path}: [{section.name}] weight_data_type = {dtype_text!r}; "
            f"wanted one of {', '.join(DTYPES)}"
        )
    sizes = {field: section.integer(key, minimum=1) for key, field in _SIZES.items()}
    return {
        **sizes,
        "model_name": section.text("model_name", "model"),
        "num_layers": section.integer("num_layer", minimum=1, maximum=MAX_LAYERS),
        "hidden_size": sizes["num_heads"] * sizes["head_size"],
        "num_kv_heads": sizes["num_heads"],
        "max_positions": section.integer("max_pos_seq_len", max_positions, minimum=1),
        "start_id": section.integer("start_id"),
        "end_id": section.integer("end_id"),
        "weight_dtype": dtype,
    }


def common_keys(config: ModelConfig, tensor_para_size: int) -> dict[str, object]:
    """The keys that read_common reads, and layernorm_eps, which families default differently."""
    return {
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "model_name": config.model_name,
        "num_layer": config.num_layers,
        "max_pos_seq_len": config.max_positions,
        "start_id": config.start_id,
        "end_id": config.end_id,
        "weight_data_type": config.weight_dtype,
        "tensor_para_size": tensor_para_size,
        "layernorm_eps": config.norm_eps,
    }


def read_rope(section: IniSection, default_size: int | None) -> RopeConfig:
    """rotary_embedding (rotated dimensions of a head; default_size None: mandatory) and keys of ours."""
    original = section.integer("rope_original_max_positions", RopeConfig.original_max_positions, minimum=1)
    if section.text("rotary_embedding", "").lower() == "none":  # FasterTransformer's writes Python's None
        size = section.integer("size_per_head", minimum=2)
    else:
        size = section.integer("rotary_embedding", default_size, minimum=1)
    scaling = section.choice("rope_scaling_type", RopeConfig.scaling, ROPE_SCALINGS)
    fields: dict[str, Any] = {
        **{field: section.number(key, getattr(RopeConfig, field)) for key, field in _ROPE_NUMBERS.items()},
        **{field: section.flag(key, getattr(RopeConfig, field)) for key, field in _ROPE_FLAGS.items()},
        **{field: section.numbers(key, (size + 1) // 2) for key, field in _ROPE_LISTS.items()},
    }
    if scaling == "longrope" and not (fields["short_factors"] and fields["long_factors"]):
        wanted = f"rope_short_factors and rope_long_factors of {(size + 1) // 2} numbers each"
        raise ConfigError(f"{section.path}: [{section.name}] rope_scaling_type = longrope; wanted {wanted}")
    return RopeConfig(size=size, scaling=scaling, original_max_positions=original, **fields)


def rope_keys(config: ModelConfig) -> dict[str, object]:
    """The keys that read_rope reads."""
    rope = config.rope
    assert rope is not None, config
    return {
        "rotary_embedding": rope.size,
        "rope_scaling_type": rope.scaling,
        "rope_original_max_positions": rope.original_max_positions,
        **{key: getattr(rope, field) for key, field in {**_ROPE_NUMBERS, **_ROPE_FLAGS}.items()},
        **{key: joined(getattr(rope, field)) for key, field in _ROPE_LISTS.items() if getattr(rope, field)},
    }


def read_windows(section: IniSection, num_layers: int) -> tuple[int, ...]:
    """attention_windows: ModelConfig.windows."""
    return section.integers("attention_windows", num_layers)


def window_keys(config: ModelConfig) -> dict[str, object]:
    """The key that read_windows reads."""
    return {"attention_windows": joined(config.windows)} if config.windows else {}


def read_attention_scale(section: IniSection) -> float | None:
    """attention_scale: ModelConfig.attention_scale."""
    return section.number("attention_scale") if "attention_scale" in section.items else None


def attention_scale_keys(config: ModelConfig) -> dict[str, object]:
    """The key that read_attention_scale reads."""
    return {} if config.attention_scale is None else {"attention_scale": config.attention_scale}


def read_kv_heads(section: IniSection, num_heads: int) -> int:
    """kv_head_num: ModelConfig.num_kv_heads; num_heads if it is absent. ConfigError if it is no divisor."""
    kv_heads = section.integer("kv_head_num", num_heads, minimum=1)
    if num_heads % kv_heads:
        found = f"[{section.name}] head_num = {num_heads}, kv_head_num = {kv_heads}"
        raise ConfigError(f"{section.path}: {found}; wanted a head_num that is a multiple of it")
    return kv_heads


def read_grouped(section: IniSection) -> dict[str, Any]:
    """read_common, with kv_head_num and hidden_units."""
    common = read_common(section)
    return {
        **common,
        "num_kv_heads": read_kv_heads(section, common["num_heads"]),
        "hidden_size": section.integer("hidden_units", common["hidden_size"], minimum=1),
    }


def joined(values: Iterable[float]) -> str:
    """The text of a list of numbers, as IniSection.numbers reads it."""
    return " ".join(map(repr, values))
