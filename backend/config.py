"""Settings, read in one place and frozen after.

`ModelConfig` is what `config.ini` says of a model (FasterTransformer's spellings end here), `EngineConfig`
what `config.pbtxt` of the `fastertransformer` model says of the engine. Sources: shared contract of
FasterTransformer's `ParallelGptTritonModel.cc` for the [gpt] section; the [llama] section is ours, in the
same spelling.
"""

from __future__ import annotations

import configparser
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Callable

from tridecode.backend.errors import ConfigError, UnsupportedError

DTYPES = ("fp32", "fp16", "bf16")
#: FasterTransformer's FT_SEQ_LEN_MAX: the limit of a model without learned positions that names none
DEFAULT_MAX_POSITIONS = 16384
#: a config.ini that names more is damaged: what follows makes a list of tensors of every layer
MAX_LAYERS = 4096


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. size: rotated dimensions of a head; theta: base; scaling: "default",
    "linear" or "llama3".

    Source: Su et al. 2021; the llama3 rule is transformers' `_compute_llama3_parameters`.
    """

    size: int
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Sizes are of the whole model, not of a rank."""

    family: str  # "gpt", "bloom" or "llama": a module of backend.models
    model_name: str
    num_layers: int
    hidden_size: int  # num_heads * head_size, save for some LLaMA variants
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    start_id: int
    end_id: int
    weight_dtype: str = "fp32"  # of the files; "fp32", "fp16" or "bf16"
    activation: str = "gelu_tanh"  # "gelu_tanh", "gelu" (erf), "relu" or "silu"
    rope: RopeConfig | None = None
    attention_bias: bool = True  # of query_key_value and dense
    mlp_bias: bool = True
    tied_head: bool = True  # no model.lm_head.weight.bin: the head is the word embedding
    residual_from_norm: bool = False  # BLOOM's apply_residual_connection_post_layernorm


class IniSection:
    """One section of a config.ini, with errors that name file, section and key (the INI dialect of
    INIReader.h)."""

    def __init__(self, path: Path, name: str, items: dict[str, str]):
        self.path, self.name, self._items = path, name, items

    def __contains__(self, key: str) -> bool:
        return key.lower() in self._items

    def _convert(self, key: str, convert: Callable, wanted: str, default):
        text = self._items.get(key.lower())
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
        return self._convert(key, _flag, "true or false", default)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


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
        raise ConfigError(f"{path} is no INI file: {' '.join(str(error).split())}") from None
    return {name.lower(): IniSection(path, name, dict(parser[name])) for name in parser.sections()}


_ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}  # FasterTransformer's Gelu is the tanh form


def read_model_config(path: Path, tied_head: bool | None = None) -> ModelConfig:
    """Read `config.ini` (a file or the directory that holds it).

    tied_head: whether the head is the word embedding; None: it is where no model.lm_head.weight file lies
    beside the config. Raises ConfigError naming the file, the key, what was found and what was wanted;
    UnsupportedError for a known setting that this version does not run.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.ini"
    sections = read_ini(path)
    if tied_head is None:
        tied_head = not (path.parent / "model.lm_head.weight.bin").exists()
    if "gpt" in sections:
        return _read_gpt(sections["gpt"], tied_head)
    if "llama" in sections:
        return _read_llama(sections["llama"], tied_head)
    found = ", ".join(f"[{section.name}]" for section in sections.values()) or "none"
    raise ConfigError(f"{path}: sections found: {found}; wanted [gpt] (GPT-2, BLOOM) or [llama]")


def _common(section: IniSection) -> dict:
    dtype_text = section.text("weight_data_type").lower()
    dtype = next((known for known in DTYPES if known in dtype_text), None)
    if dtype is None:
        raise ConfigError(
            f"{section.path}: [{section.name}] weight_data_type = {dtype_text!r}; "
            f"wanted one of {', '.join(DTYPES)}"
        )
    return {
        "model_name": section.text("model_name", "model"),
        "num_layers": section.integer("num_layer", minimum=1, maximum=MAX_LAYERS),
        "num_heads": section.integer("head_num", minimum=1),
        "head_size": section.integer("size_per_head", minimum=1),
        "mlp_size": section.integer("inter_size", minimum=1),
        "vocab_size": section.integer("vocab_size", minimum=1),
        "start_id": section.integer("start_id"),
        "end_id": section.integer("end_id"),
        "weight_dtype": dtype,
    }


def _read_gpt(section: IniSection, tied_head: bool) -> ModelConfig:
    common = _common(section)
    if section.text("layernorm_type", "pre_layernorm") != "pre_layernorm":
        raise UnsupportedError(
            f"{section.path}: [gpt] layernorm_type = {section.text('layernorm_type')}; "
            "this version runs pre_layernorm"
        )
    for key in ("has_adapters",):
        if section.flag(key, False):
            raise UnsupportedError(f"{section.path}: [gpt] {key} = true; this version has no adapters")
    if not section.flag("has_post_decoder_layernorm", True):
        raise UnsupportedError(
            f"{section.path}: [gpt] has_post_decoder_layernorm = false; "
            "this version runs models with a final LayerNorm"
        )
    activation_text = section.text("activation_type", "Gelu").lower()
    # gelu_erf is ours: a checkpoint whose GELU is the exact one
    activation = "gelu" if activation_text == "gelu_erf" else _ACTIVATIONS.get(activation_text)
    if activation not in ("gelu_tanh", "gelu", "relu"):
        raise UnsupportedError(
            f"{section.path}: [gpt] activation_type = {activation_text}; "
            "this version runs Gelu (tanh), gelu_erf and Relu"
        )
    has_positions = section.flag("has_positional_encoding", True)
    alibi = section.flag("use_attention_linear_bias", False)
    embedding_norm = section.flag("has_pre_decoder_layernorm", False)
    if (has_positions, alibi, embedding_norm) == (True, False, False):
        family = "gpt"
    elif (has_positions, alibi, embedding_norm) == (False, True, True):
        family = "bloom"
    else:
        raise UnsupportedError(
            f"{section.path}: [gpt] has_positional_encoding, use_attention_linear_bias, "
            f"has_pre_decoder_layernorm are {has_positions}, {alibi}, {embedding_norm}; "
            "this version runs True, False, False (GPT) and False, True, True (BLOOM)"
        )
    return ModelConfig(
        family=family,
        hidden_size=common["num_heads"] * common["head_size"],
        num_kv_heads=common["num_heads"],
        max_positions=section.integer(
            "max_pos_seq_len", None if has_positions else DEFAULT_MAX_POSITIONS, minimum=1
        ),
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation=activation,
        tied_head=tied_head,
        residual_from_norm=section.flag("residual_from_norm", False),
        **common,
    )


def _read_llama(section: IniSection, tied_head: bool) -> ModelConfig:
    common = _common(section)
    scaling = section.text("rope_scaling_type", "default")
    if scaling not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"{section.path}: [llama] rope_scaling_type = {scaling}; "
            "this version runs default, linear and llama3"
        )
    rope = RopeConfig(
        size=section.integer("rotary_embedding", common["head_size"], minimum=2),
        theta=section.number("rope_theta", 10000.0),
        scaling=scaling,
        factor=section.number("rope_scaling_factor", 1.0),
        low_freq_factor=section.number("rope_low_freq_factor", 1.0),
        high_freq_factor=section.number("rope_high_freq_factor", 4.0),
        original_max_positions=section.integer("rope_original_max_positions", 8192),
    )
    num_kv_heads = section.integer("kv_head_num", common["num_heads"], minimum=1)
    if common["num_heads"] % num_kv_heads:
        raise ConfigError(
            f"{section.path}: [llama] head_num = {common['num_heads']} is no multiple of "
            f"kv_head_num = {num_kv_heads}"
        )
    return ModelConfig(
        family="llama",
        hidden_size=section.integer("hidden_units", common["num_heads"] * common["head_size"], minimum=1),
        num_kv_heads=num_kv_heads,
        max_positions=section.integer("max_pos_seq_len", DEFAULT_MAX_POSITIONS, minimum=1),
        norm_eps=section.number("layernorm_eps", 1e-6),
        activation="silu",
        rope=rope,
        attention_bias=section.flag("attn_bias", False),
        mlp_bias=section.flag("mlp_bias", False),
        tied_head=tied_head,
        **common,
    )


def model_config_ini(config: ModelConfig, tensor_para_size: int) -> str:
    """The text of config.ini for `config`; read_model_config of it gives `config` back."""
    lines: list[tuple[str, object]] = [
        ("model_name", config.model_name),
        ("head_num", config.num_heads),
        ("size_per_head", config.head_size),
        ("inter_size", config.mlp_size),
        ("num_layer", config.num_layers),
        ("vocab_size", config.vocab_size),
        ("max_pos_seq_len", config.max_positions),
        ("start_id", config.start_id),
        ("end_id", config.end_id),
        ("weight_data_type", config.weight_dtype),
        ("tensor_para_size", tensor_para_size),
        ("layernorm_eps", repr(config.norm_eps)),
    ]
    if config.family == "llama":
        assert config.rope is not None
        lines += [
            ("kv_head_num", config.num_kv_heads),
            ("hidden_units", config.hidden_size),
            ("attn_bias", config.attention_bias),
            ("mlp_bias", config.mlp_bias),
            ("rotary_embedding", config.rope.size),
            ("rope_theta", repr(config.rope.theta)),
            ("rope_scaling_type", config.rope.scaling),
            ("rope_scaling_factor", repr(config.rope.factor)),
            ("rope_low_freq_factor", repr(config.rope.low_freq_factor)),
            ("rope_high_freq_factor", repr(config.rope.high_freq_factor)),
            ("rope_original_max_positions", config.rope.original_max_positions),
        ]
        section = "llama"
    else:
        bloom = config.family == "bloom"
        lines += [
            ("layernorm_type", "pre_layernorm"),
            ("activation_type", {"gelu_tanh": "Gelu", "gelu": "gelu_erf", "relu": "Relu"}[config.activation]),
            ("has_positional_encoding", not bloom),
            ("has_pre_decoder_layernorm", bloom),
            ("has_post_decoder_layernorm", True),
            ("use_attention_linear_bias", bloom),
        ]
        if bloom:
            lines += [("model_variant", "bloom-pre"), ("residual_from_norm", config.residual_from_norm)]
        section = "gpt"
    return f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in lines)


def check_tensor_size(config: ModelConfig, tensor_para_size: int) -> None:
    """Raises ConfigError where so many tensor ranks cannot share the heads and the MLP evenly.

    The columns of a matrix may still divide where the heads do not: 3 heads of 16 over 2 ranks.
    """
    for key, size in (
        ("head_num", config.num_heads),
        ("kv_head_num", config.num_kv_heads),
        ("inter_size", config.mlp_size),
    ):
        if size % tensor_para_size:
            raise ConfigError(
                f"tensor_para_size = {tensor_para_size} does not divide {key} = {size} of {config.model_name}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. Read from the `parameters` of the fastertransformer model's config.pbtxt.

    The first group keeps FasterTransformer's keys; the second is ours. None means "decide at start-up and say
    so".
    """

    tensor_para_size: int = 1
    pipeline_para_size: int = 1
    data_type: str = "fp32"
    int8_mode: int = 0

    device: str = "auto"  # "auto", "cpu", "cuda"
    weights: str = "files"  # or "random": of the model's true shape, for benchmarks without a checkpoint
    max_sequences: int = 64  # sequences that decode together
    max_queued_requests: int = 1024  # requests that wait for a place; one more is answered UNAVAILABLE
    max_sequence_tokens: int | None = None  # prompt + output; None: what the model's positions allow
    max_step_tokens: int | None = None  # tokens of one step; prompts are cut into chunks to fit
    block_tokens: int = 32  # KV-cache tokens of one block
    cache_bytes: int | None = None  # None: memory_fraction of what is free after loading and warm-up
    memory_fraction: float = 0.9
    max_bad_word_tokens: int = 256  # a sequence's bad words, all ids together
    max_stop_word_tokens: int = 1024
    request_timeout_s: float = 600.0  # deadline of a request that names none
    step_timeout_s: float = 60.0  # a step that takes longer is taken for hung
    start_timeout_s: float = 900.0  # loading and warming up, at most
    cuda_graphs: bool = True
    num_threads: int = 0  # CPU threads of the engine; 0: torch's own choice
    batch_invariant: bool = False  # CPU, fp32: a request's log-probs do not depend on its company

    extra: dict[str, str] = field(default_factory=dict)  # parameters that are not the engine's


_INT_KEYS = {"tensor_para_size", "pipeline_para_size", "int8_mode", "max_sequences", "max_queued_requests",
             "block_tokens", "max_bad_word_tokens", "max_stop_word_tokens", "num_threads"}  # fmt: skip
_OPTIONAL_INT_KEYS = {"max_sequence_tokens", "max_step_tokens", "cache_bytes"}
_FLOAT_KEYS = {"memory_fraction", "request_timeout_s", "step_timeout_s", "start_timeout_s"}


def read_engine_config(parameters: dict[str, str], where: str) -> EngineConfig:
    """EngineConfig from the string parameters of config.pbtxt. `where` names the file in errors.

    "auto" or an empty text is the default. Raises ConfigError naming file, key, found and wanted.
    """
    known = {f.name for f in fields(EngineConfig)} - {"extra"}
    values: dict[str, object] = {}
    for key, text in parameters.items():
        if key not in known or text.strip() in ("", "auto"):
            continue
        values[key] = _parameter(key, text.strip(), where)
    extra = {key: text for key, text in parameters.items() if key not in known}
    config = EngineConfig(**values, extra=extra)  # type: ignore[arg-type]
    _check_engine_config(config, where)
    return config


def _parameter(key: str, text: str, where: str) -> object:
    convert: Callable[[str], object] = str
    wanted = "a text"
    if key in _INT_KEYS or key in _OPTIONAL_INT_KEYS:
        convert, wanted = (lambda value: int(value, 0)), "a whole number"
    elif key in _FLOAT_KEYS:
        convert, wanted = float, "a number"
    elif key in ("cuda_graphs", "batch_invariant"):
        convert, wanted = _flag, "true or false"
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(f"{where}: parameter {key} is {text!r}; wanted {wanted}") from None


def _check_engine_config(config: EngineConfig, where: str) -> None:
    def demand(fine: bool, key: str, wanted: str) -> None:
        if not fine:
            raise ConfigError(f"{where}: parameter {key} is {getattr(config, key)!r}; wanted {wanted}")

    demand(config.data_type in DTYPES, "data_type", "one of " + ", ".join(DTYPES))
    demand(config.weights in ("files", "random"), "weights", "files or random")
    demand(config.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda")
    for key in (
        "tensor_para_size",
        "pipeline_para_size",
        "max_sequences",
        "max_queued_requests",
        "block_tokens",
    ):
        demand(getattr(config, key) >= 1, key, "1 or more")
    for key in _OPTIONAL_INT_KEYS:
        demand(getattr(config, key) is None or getattr(config, key) >= 1, key, "1 or more, or auto")
    demand(0.0 < config.memory_fraction <= 1.0, "memory_fraction", "a number in (0, 1]")
    for key in ("request_timeout_s", "step_timeout_s", "start_timeout_s"):
        demand(getattr(config, key) > 0, key, "more than 0 seconds")
    if config.int8_mode != 0:
        raise UnsupportedError(f"{where}: parameter int8_mode is {config.int8_mode}; this version runs 0")
