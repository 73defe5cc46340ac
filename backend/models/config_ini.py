"""config.ini: the INI reader, and the keys that several families share. No torch.

The spellings are those of FasterTransformer's `ParallelGptTritonModel.cc`, even in our own sections.
"""

from __future__ import annotations

import configparser
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.configuration.model_config import (
    DEFAULT_MAX_POSITIONS,
    DTYPES,
    MAX_POSITIONS,
    ModelConfig,
)
from tridecode.backend.configuration.setting_values import parse_flag
from tridecode.backend.models.ini_keys import ACCEPTED
from tridecode.backend.wire.sampling_params import MAX_END_IDS

#: more layers in a config.ini mean a damaged file; the limit bounds the lists of tensors made from it
MAX_LAYERS = 4096
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


class IniSection:
    """One section of a config.ini in the dialect of INIReader.h. Errors name file, section and key.

    A default of None makes a key mandatory. Raises ConfigError for a missing key, a value of another type,
    and a value that ini_keys.ACCEPTED does not allow. prefix: prefix of its keys in the file, for errors.
    asked: the keys that were read.
    """

    def __init__(
        self, path: Path, name: str, items: dict[str, str], prefix: str = "", asked: set[str] | None = None
    ):
        self.path, self.name, self.items, self.prefix = path, name, items, prefix
        self.asked = set() if asked is None else asked

    def with_prefix(self, prefix: str) -> IniSection:
        """Return the keys that begin with `prefix`, without it."""
        own = {key[len(prefix) :]: text for key, text in self.items.items() if key.startswith(prefix)}
        return IniSection(self.path, self.name, own, prefix, self.asked)

    def _convert(self, key: str, convert: Callable, wanted: str, default):
        self.asked.add(self.prefix + key.lower())
        text = self.items.get(key.lower())
        if text is None:
            if default is None:
                key = self.prefix + key
                raise ConfigError(
                    f"{self.path}: section [{self.name}] has no {key}; wanted {key} = <{wanted}>"
                )
            return default
        accepted = ACCEPTED.get(key)
        try:
            value = convert(text.strip())
        except ValueError:
            raise self.wrong(key, repr(text[:80]), wanted) from None
        if accepted is not None and not accepted.test(value):
            raise self.wrong(key, str(value), accepted.wanted)
        return value

    def wrong(self, key: str, found: object, wanted: str) -> ConfigError:
        """Return the error for a value of `key`."""
        return ConfigError(f"{self.path}: [{self.name}] {self.prefix}{key} = {found}; wanted {wanted}")

    def integer(
        self,
        key: str,
        default: int | None = None,
        minimum: int | None = None,
        maximum: int = 2**31 - 1,
    ) -> int:
        value = self._convert(key, lambda text: int(text, 0), "a whole number", default)
        if minimum is not None and value < minimum:
            raise self.wrong(key, value, f"{minimum} or more")
        if value > maximum:
            raise self.wrong(key, value, f"{maximum} or less")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self._convert(key, _finite, "a number (finite)", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._convert(key, str, "a text", default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._convert(key, parse_flag, "true or false", default)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return numbers separated by blanks or commas: `length` of them, or none."""
        text = self.text(key, "")
        try:
            values = tuple(_finite(part) for part in text.replace(",", " ").split())
        except ValueError:
            values = (math.nan,)
        if values and (len(values) != length or math.isnan(values[0])):
            raise self.wrong(key, repr(text[:80]), f"{length} numbers with blanks between them")
        return values

    def integers(self, key: str, length: int, minimum: int = 0) -> tuple[int, ...]:
        """Return integers separated by blanks or commas: `length` of them, or none."""
        values = self.numbers(key, length)
        if any(value != int(value) or not minimum <= value < 2**31 for value in values):
            found = repr(self.text(key, "")[:80])
            raise self.wrong(key, found, f"whole numbers of {minimum} or more")
        return tuple(map(int, values))

    def choice(self, key: str, default: str, values: Mapping[str, str]) -> str:
        """Return the entry of `values` for the key's text, ignoring case.

        Raises UnsupportedError for any other text.
        """
        text = self.text(key, default).lower()
        if text not in values:
            raise self.unsupported(f"{self.prefix}{key} = {text}", ", ".join(values))
        return values[text]

    def demand(self, key: str, value: bool) -> None:
        """Raise UnsupportedError unless the flag is `value`, its default."""
        if self.flag(key, value) is not value:
            raise self.unsupported(f"{key} = {str(not value).lower()}", str(value).lower())

    def unsupported(self, found: str, supported: str) -> UnsupportedError:
        """Return the error for a known setting that this version does not support."""
        return UnsupportedError(f"{self.path}: [{self.name}] {found}; this version runs {supported}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def read_ini(path: Path) -> dict[str, IniSection]:
    """Sections of an INI file by lower-case name. Raises ConfigError if it is missing or cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a weight directory has a config.ini") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a valid INI file: {error}") from None
    return parse_ini(text, path)


def parse_ini(text: str, path: Path) -> dict[str, IniSection]:
    """Sections of the text of an INI file by lower-case name. path: for errors.

    Raises ConfigError if it cannot be parsed, and for a repeated key or section: FasterTransformer joins the
    values of a repeated key, and a number is then the first.
    """
    parser = configparser.ConfigParser(
        interpolation=None,
        delimiters=("=", ":"),
        comment_prefixes=("#", ";"),
        inline_comment_prefixes=(";",),
        default_section="\0",  # [DEFAULT] is an ordinary section
    )
    try:
        parser.read_string(text)
    except configparser.DuplicateOptionError as error:
        found = f"[{error.section}] has {error.option} twice, again in line {error.lineno}"
        raise ConfigError(f"{path}: {found}; wanted one value: remove the other") from None
    except configparser.DuplicateSectionError as error:
        raise _repeated(path, error.section) from None
    except configparser.Error as error:
        raise ConfigError(f"{path} is not a valid INI file: {' '.join(str(error).split())}") from None
    sections: dict[str, IniSection] = {}
    for name in parser.sections():
        if name.lower() in sections:
            raise _repeated(path, name)
        sections[name.lower()] = IniSection(path, name, dict(parser[name]))
    return sections


def _repeated(path: Path, section: str) -> ConfigError:
    return ConfigError(f"{path} has the section [{section}] twice; wanted one: join their keys")


def read_common(section: IniSection, max_positions: int | None = DEFAULT_MAX_POSITIONS) -> dict[str, Any]:
    """Return the fields of ModelConfig that every family reads in the same way. hidden_size: num_heads *
    head_size.

    max_positions: default of max_pos_seq_len; None: the key is mandatory.
    """
    dtype_text = section.text("weight_data_type").lower()
    dtype = next((known for known in DTYPES if known in dtype_text), None)
    if dtype is None:
        raise ConfigError(
            f"{section.path}: [{section.name}] weight_data_type = {dtype_text!r}; "
            f"wanted one of {', '.join(DTYPES)}"
        )
    sizes = {field: section.integer(key, minimum=1) for key, field in _SIZES.items()}
    refuse_experts(section)
    return {
        **sizes,
        "model_name": section.text("model_name", "model"),
        "num_layers": section.integer("num_layer", minimum=1, maximum=MAX_LAYERS),
        "hidden_size": sizes["num_heads"] * sizes["head_size"],
        "num_kv_heads": sizes["num_heads"],
        "max_positions": section.integer("max_pos_seq_len", max_positions, minimum=1, maximum=MAX_POSITIONS),
        "start_id": read_token(section, "start_id", sizes["vocab_size"]),
        "end_id": read_token(section, "end_id", sizes["vocab_size"]),
        "more_end_ids": read_more_end_ids(section, sizes["vocab_size"]),
        "weight_dtype": dtype,
    }


def read_token(section: IniSection, key: str, vocab_size: int) -> int:
    """Return a token id of the vocabulary, or -1 for none."""
    token = section.integer(key)
    if not -1 <= token < vocab_size:
        wanted = f"0 to {vocab_size - 1}, a token of vocab_size = {vocab_size}, or -1 for none"
        raise section.wrong(key, token, wanted)
    return token


def read_more_end_ids(section: IniSection, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of end_ids without end_id, which must be one of them; () without the key."""
    text = section.text("end_ids", "")
    ids = section.integers("end_ids", len(text.replace(",", " ").split()))
    if not ids:
        return ()
    end_id = section.integer("end_id")
    if end_id not in ids:
        raise section.wrong("end_ids", text, f"all tokens that end a text, end_id = {end_id} among them")
    if len(ids) > MAX_END_IDS or max(ids) >= vocab_size:
        raise section.wrong("end_ids", text, f"{MAX_END_IDS} tokens or fewer, of 0 to {vocab_size - 1}")
    return tuple(token for token in dict.fromkeys(ids) if token != end_id)


def refuse_experts(section: IniSection) -> None:
    """Raise UnsupportedError for the keys of a mixture of experts, in FasterTransformer's spellings."""
    if section.integer("expert_num", 0, minimum=0) > 1:
        raise section.unsupported(f"expert_num = {section.integer('expert_num')}", "one MLP in each layer")
    layers = section.text("moe_layers", "")
    if layers.strip("[] ").lower() not in ("", "none"):
        raise section.unsupported(f"moe_layers = {layers[:80]}", "one MLP in each layer")


def common_keys(config: ModelConfig, tensor_para_size: int) -> dict[str, object]:
    """The keys that read_common reads, and layernorm_eps, which families default differently."""
    return {
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "model_name": config.model_name,
        "num_layer": config.num_layers,
        "max_pos_seq_len": config.max_positions,
        "start_id": config.start_id,
        "end_id": config.end_id,
        **({"end_ids": joined((config.end_id, *config.more_end_ids))} if config.more_end_ids else {}),
        "weight_data_type": config.weight_dtype,
        "tensor_para_size": tensor_para_size,
        "layernorm_eps": config.norm_eps,
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
    """Return kv_head_num (ModelConfig.num_kv_heads), or num_heads if absent. Raises ConfigError unless it
    divides num_heads.
    """
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
    """Return the text of a list of numbers, as read by IniSection.numbers."""
    return " ".join(map(repr, values))
