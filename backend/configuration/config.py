"""The settings of a model and of the engine, frozen once they are read.

`ModelConfig` describes a model; the families of backend.models read it from `config.ini` and write it there.
`EngineConfig` describes how the engine runs; it is read here, from `config.pbtxt` of the `fastertransformer`
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Callable, TypeVar

from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.configuration.door_parameters import Parameter, refuse_unknown
from tridecode.backend.weights.layout import divides, share_size, stage_layers
from tridecode.backend.weights.quantization import Quantization

DTYPES = ("fp32", "fp16", "bf16")
CACHE_FORMATS = ("fp8", "int8")  # of kv_cache_dtype, beside that of data_type
_MAX_RANKS = 1024  # that an error offers
VERIFY_MODES = ("sizes", "sampled", "full")
#: FasterTransformer's FT_SEQ_LEN_MAX: the limit of a model whose config.ini names none
DEFAULT_MAX_POSITIONS = 16384
#: largest number of positions: angles are computed in float32, which has no odd integers beyond it
MAX_POSITIONS = 1 << 24


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. size: rotated dimensions of a head; theta: base; scaling: one of SCALINGS.

    factor: of all scalings but longrope. low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow,
    truncate: yarn. short_factors, long_factors: longrope, size / 2 of each. recompute: longrope; a sequence
    that grows beyond original_max_positions is computed again with the long factors. attention_factor: cos
    and sin are multiplied by it. interleaved: each even dimension is rotated against the next (GPT-J); else
    half against half. An odd size is rounded up, but its frequencies are not those of the next even one.
    Source: Su et al. 2021; the scalings are those of transformers' modeling_rope_utils.
    """

    size: int
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False
    recompute: bool = False


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer of a pruned model (docs/guides/pruning.md), of all ranks together.

    kept_heads: the number that each query head had before pruning, ascending; ALiBi slopes follow it. (): not
    known.
    """

    num_heads: int
    num_kv_heads: int
    mlp_size: int
    kept_heads: tuple[int, ...] = ()


_Config = TypeVar("_Config", bound="ModelConfig")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Sizes are of the whole model, not of a rank.

    num_heads, num_kv_heads, mlp_size: of a pruned model before it was pruned; `of_layer` has a layer's own.
    """

    family: str  # the name of a backend.models.Family
    model_name: str
    num_layers: int
    hidden_size: int  # num_heads * head_size, except in some LLaMA variants
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
    attention_bias: bool = True  # of query_key_value, and of dense unless dense_bias differs
    dense_bias: bool | None = None  # None: as attention_bias
    mlp_bias: bool = True
    tied_head: bool = True  # no model.lm_head.weight.bin: the head is the word embedding
    head_bias: bool = False  # model.lm_head.bias.bin
    #: "sequential": x += attention(norm(x)), then x += mlp(norm(x)); "parallel": both from one x;
    #: "from_norm": as sequential, but each is added to norm(x), not to x; "post_norm": x = norm(x +
    #: attention(x)), then x = norm(x + mlp(x)); "sandwich": x += norm(attention(norm(x))), the MLP likewise
    residual: str = "sequential"
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_size)
    scale_by_layer: bool = False  # layer l (from 0) divides its scale by l + 1
    #: tokens that a query of each layer sees, itself included; 0: all; empty: all in every layer
    windows: tuple[int, ...] = ()
    layer_sizes: tuple[LayerSizes, ...] = ()  # of each layer of a pruned model; (): all as above
    quantization: Quantization | None = None  # of the layers' matrices; None: all files have weight_dtype
    more_end_ids: tuple[int, ...] = ()  # further tokens that end a text, as end_id does

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def of_layer(self: _Config, layer: int) -> _Config:
        """This config with the sizes of one layer as its own."""
        if not self.layer_sizes:
            return self
        sizes = self.layer_sizes[layer]
        return replace(
            self,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            mlp_size=sizes.mlp_size,
            layer_sizes=(),
        )

    def largest_layer(self: _Config) -> _Config:
        """This config with the largest sizes of any layer: for buffers that layers share."""
        if not self.layer_sizes:
            return self
        return replace(
            self,
            num_heads=max(sizes.num_heads for sizes in self.layer_sizes),
            num_kv_heads=max(sizes.num_kv_heads for sizes in self.layer_sizes),
            mlp_size=max(sizes.mlp_size for sizes in self.layer_sizes),
            layer_sizes=(),
        )

    def mlp_share(self, tensor_size: int) -> int:
        """The largest share of an MLP that a tensor rank has of any layer, padding included."""
        layers = self.layer_sizes or (self,)
        return max(share_size(layer.mlp_size, tensor_size, padded=True) for layer in layers)

    def head_numbers(self, layer: int) -> Sequence[int]:
        """The number before pruning of each query head of a layer."""
        if not self.layer_sizes:
            return range(self.num_heads)
        sizes = self.layer_sizes[layer]
        return sizes.kept_heads or range(sizes.num_heads)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of all layers."""
        return () if self.rope is None else (self.rope,)

    @property
    def long_prompt_tokens(self) -> int:
        """longrope: all of a longer prompt is rotated with the long factors; 0: another scaling."""
        return max((r.original_max_positions for r in self.ropes if r.scaling == "longrope"), default=0)

    @property
    def recomputes_long(self) -> bool:
        return any(rope.recompute for rope in self.ropes)


def check_tensor_size(config: ModelConfig, tensor_para_size: int) -> None:
    """Raises ConfigError unless the tensor ranks can share the heads evenly.

    A matrix may be divisible where its heads are not: 3 heads of 16 have 48 columns, which 2 divides. Fewer
    key/value heads than ranks are replicated; an MLP that the ranks do not divide is padded with zeros.
    """
    for layer in range(config.num_layers if config.layer_sizes else 1):
        sizes = config.of_layer(layer)
        where = f"layer {layer} of {config.model_name}" if config.layer_sizes else config.model_name
        check_heads(sizes.num_heads, sizes.num_kv_heads, tensor_para_size, where)


def check_heads(num_heads: int, num_kv_heads: int, tensor_para_size: int, where: str) -> None:
    """Raise ConfigError unless the heads can be split evenly over the tensor ranks."""
    if found := _unshared_heads(num_heads, num_kv_heads, tensor_para_size, where):
        most = min(num_heads, _MAX_RANKS)
        every = range(1, most + 1)
        fitting = [str(n) for n in every if not _unshared_heads(num_heads, num_kv_heads, n, where)]
        raise ConfigError(
            f"tensor_para_size = {tensor_para_size} {found}; wanted one of {', '.join(fitting)}"
        )


def check_stages(num_layers: int, pipeline_para_size: int, where: str) -> None:
    """Raises ConfigError if a pipeline stage would have no layer.

    Stages have ceil(layers / stages) layers, the last one what is left: 4 stages of 2 layers would share 6
    layers among 3.
    """
    if _has_idle_stage(num_layers, pipeline_para_size):
        each = -(-num_layers // pipeline_para_size)
        fitting = [
            str(n) for n in range(1, min(num_layers, _MAX_RANKS) + 1) if not _has_idle_stage(num_layers, n)
        ]
        raise ConfigError(
            f"pipeline_para_size = {pipeline_para_size} leaves stages without layers: num_layer = "
            f"{num_layers} of {where} in stages of {each} fills {-(-num_layers // each)}; wanted one of "
            f"{', '.join(fitting)}"
        )


def _has_idle_stage(num_layers: int, stages: int) -> bool:
    return not stage_layers(num_layers, stages - 1, stages)


def check_ranks(config: ModelConfig, tensor_para_size: int, pipeline_para_size: int) -> None:
    """Raises ConfigError, which says what would fit, unless every rank gets an equal share of the heads and
    at least one layer."""
    check_tensor_size(config, tensor_para_size)
    check_stages(config.num_layers, pipeline_para_size, config.model_name)


def _unshared_heads(num_heads: int, num_kv_heads: int, ranks: int, where: str) -> str:
    if not divides(num_heads, ranks):
        return f"does not divide head_num = {num_heads} of {where}"
    if not divides(num_kv_heads, ranks, shared=True):
        return f"does not divide kv_head_num = {num_kv_heads} of {where} and is not a multiple of it"
    return ""


def parse_flag(text: str) -> bool:
    """A boolean in the spellings of INIReader.h. Raises ValueError for any other text."""
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


@dataclass(frozen=True)
class Accepted:
    """Limits of a value beyond its type. wanted: in words, for errors and reference/config_pbtxt.md."""

    wanted: str
    test: Callable[[Any], bool]


_T = TypeVar("_T")


def setting(default: _T, meaning: str, accepted: Accepted | None = None) -> _T:
    """A field of EngineConfig. meaning: for docs/reference/config_pbtxt.md. accepted: None: any value."""
    return field(default=default, metadata={"meaning": meaning, "accepted": accepted})


def _one_of(*values: str) -> Accepted:
    return Accepted("one of " + ", ".join(values), lambda value: value in values)


_COUNT = Accepted("1 or more", lambda value: value >= 1)
_SOME = Accepted("0 or more", lambda value: value >= 0)
_CHOSEN = Accepted("1 or more, or auto", lambda value: value is None or value >= 1)
_SECONDS = Accepted("more than 0 seconds", lambda value: value > 0)
_DEVICES = Accepted(
    "numbers separated by commas, as in 0,1, or auto",
    lambda value: value == "auto" or all(part.strip().isdigit() for part in value.split(",")),
)
_SHARE = Accepted("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)
_PART = Accepted("a number in [0, 1]", lambda value: 0.0 <= value <= 1.0)

#: FasterTransformer's: 0 no rounding while loading, 1 weights, 2 weights and the rows of their inputs
INT8_MODES = (0, 1, 2)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs, from the `parameters` of the fastertransformer model's config.pbtxt.

    The keys of the first group are FasterTransformer's, the others ours. None: chosen and logged at start-up.
    """

    tensor_para_size: int = setting(1, "tensor-parallel degree; weight files of any degree load", _COUNT)
    pipeline_para_size: int = setting(1, "pipeline-parallel degree", _COUNT)
    data_type: str = setting(
        "fp32",
        "dtype of the computation and, unless `kv_cache_dtype` says otherwise, of the cache",
        _one_of(*DTYPES),
    )
    int8_mode: int = setting(
        0,
        "1: matrices of layers that the files hold in 16 or 32 bit are rounded to int8 while they are loaded;"
        " 2: and the rows of their inputs in every product (W8A8)",
    )
    int8_head: bool = setting(
        False,
        "the head, and the word embedding where it is the head, are rounded to int8 while they are loaded, "
        "whatever the layers are",
    )
    enable_custom_all_reduce: bool = setting(
        True,
        "GPUs of one node: tensor ranks sum through each other's memory, and each has its share of embedding "
        "and head; false: through NCCL, and each has all of both",
    )

    device: str = setting("auto", "auto: cuda if there is a GPU", _one_of("auto", "cpu", "cuda"))
    devices: str = setting(
        "auto",
        "GPUs of the ranks of a node, as CUDA numbers those of `CUDA_VISIBLE_DEVICES`, separated by commas; "
        "the engines of several instances take them in order; auto: from 0 on",
        _DEVICES,
    )
    weights: str = setting(
        "files",
        "random: of the model's shapes, for benchmarks without a checkpoint",
        _one_of("files", "random"),
    )
    verify_weights: str = setting(
        "sampled",
        "files against `manifest.json` at start-up: sizes, sampled (4 KiB of each MiB), full (every byte)",
        _one_of(*VERIFY_MODES),
    )
    max_sequences: int | None = setting(
        None,
        "sequences that decode together (batch slots); auto: 64 on a CPU, 64 to 256 on a GPU, by its memory",
        _CHOSEN,
    )
    max_queued_requests: int = setting(
        1024, "length of the queue; a request beyond it is answered UNAVAILABLE", _COUNT
    )
    max_sequence_tokens: int | None = setting(
        None,
        "prompt and output of one sequence; auto: the model's number of positions, a limit only where "
        "they are a learned table",
        _CHOSEN,
    )
    max_step_tokens: int | None = setting(
        None,
        "tokens of one step; longer prompts are computed in chunks. auto: 512 on a CPU, 8,192 on a GPU, "
        "16,384 on one of 70 GB or more; at most 8,192 while sequences decode",
        _CHOSEN,
    )
    block_tokens: int = setting(32, "KV-cache tokens of one block", _COUNT)
    kv_cache_dtype: str = setting(
        "auto",
        "keys and values in 8 bits with a scale for each token and head; auto: `data_type`",
        _one_of("auto", *CACHE_FORMATS),
    )
    cache_bytes: int | None = setting(
        None, "bytes of the KV cache; auto: `memory_fraction` of what is free after loading", _CHOSEN
    )
    memory_fraction: float = setting(0.9, "share of the free memory that the KV cache takes", _SHARE)
    max_bad_word_tokens: int = setting(256, "ids of all bad words of a sequence together", _SOME)
    max_stop_word_tokens: int = setting(1024, "ids of all stop words of a sequence together", _SOME)
    max_logits_bytes: int = setting(256 << 20, "bytes of the logits that one request returns", _SOME)
    request_timeout_s: float = setting(600.0, "deadline of a request that sets none, in seconds", _SECONDS)
    step_timeout_s: float = setting(60.0, "a step that takes longer counts as hung, in seconds", _SECONDS)
    start_timeout_s: float = setting(
        900.0, "time for loading and warming up, in seconds; the doors wait as long", _SECONDS
    )
    cuda_graphs: bool = setting(True, "decode steps and short prompts as CUDA graphs; false for debugging")
    num_threads: int = setting(0, "CPU threads of the engine; 0: torch's own choice", _SOME)
    batch_invariant: bool = setting(
        False, "CPU and fp32: log probabilities do not depend on the other requests of a step"
    )
    lora_path: str = setting(
        "none", "folder of LoRA adapters, relative to that of `config.pbtxt`; none: none are served"
    )
    max_loras: int = setting(8, "adapters in memory; the least recently used idle one is replaced", _COUNT)
    max_lora_rank: int = setting(64, "largest rank of an adapter", _COUNT)
    prompt_table_bytes: int = setting(
        256 << 20, "bytes of the prompt tables that all open requests have sent", _SOME
    )
    shadow_share: float = setting(
        0.0,
        "share of ended requests that are run in 16 bit too (docs/guides/quantization.md); 0: none",
        _PART,
    )
    shadow_weights: str = setting(
        "none",
        "folder of the served model's 16-bit weights for them, relative to that of `config.pbtxt`; none: the"
        " model's own files, unrounded",
    )
    shadow_slice_tokens: int | None = setting(
        None, "tokens that they compute between two steps at most; auto: 32 on a CPU, 256 on a GPU", _CHOSEN
    )
    shadow_time_share: float = setting(
        0.02,
        "share of the time that they may take while requests run; 0: only an idle engine runs them",
        _PART,
    )
    shadow_queue: int = setting(16, "requests that wait for it; more are dropped and counted", _COUNT)
    shadow_seed: int = setting(0, "of the choice of requests", _SOME)

    extra: dict[str, str] = field(default_factory=dict)  # parameters for others than the engine

    @property
    def slots(self) -> int:
        """max_sequences, once it is decided."""
        assert self.max_sequences is not None
        return self.max_sequences


#: type of a setting -> its conversion and what it accepts
_CONVERSIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (lambda text: int(text, 0), "a whole number"),
    "float": (float, "a number"),
    "bool": (parse_flag, "true or false"),
    "str": (str, "a text"),
}


def read_engine_config(parameters: dict[str, str], where: str) -> EngineConfig:
    """EngineConfig from the string parameters of config.pbtxt. `where`: the file's name, for errors.

    "auto" and the empty text mean the default. Raises ConfigError with file, key, value and what was wanted.
    """
    known = {row.name: row.type for row in engine_parameters()}
    refuse_unknown(parameters, known, where)
    values: dict[str, object] = {}
    for key, text in parameters.items():
        if key not in known or text.strip() in ("", "auto"):
            continue
        convert, wanted = _CONVERSIONS[known[key]]
        try:
            values[key] = convert(text.strip())
        except ValueError:
            raise ConfigError(f"{where}: parameter {key} is {text.strip()!r}; wanted {wanted}") from None
    extra = {key: text for key, text in parameters.items() if key not in known}
    config = EngineConfig(**values, extra=extra)  # type: ignore[arg-type]
    _check_engine_config(config, where)
    return config


def engine_parameters() -> tuple[Parameter, ...]:
    """The engine's parameters in config.pbtxt, for docs/reference/config_pbtxt.md and the known names."""
    return tuple(_engine_parameter(row) for row in fields(EngineConfig) if row.name != "extra")


def _engine_parameter(row: Field[Any]) -> Parameter:
    accepted: Accepted | None = row.metadata["accepted"]
    kind = str(row.type).removesuffix(" | None")
    wanted = accepted.wanted if accepted else _CONVERSIONS[kind][1]
    return Parameter(row.name, kind, row.default, wanted, row.metadata["meaning"])


def _check_engine_config(config: EngineConfig, where: str) -> None:
    for row in fields(EngineConfig):
        accepted: Accepted | None = row.metadata.get("accepted")
        value = getattr(config, row.name)
        if accepted and not accepted.test(value):
            raise ConfigError(f"{where}: parameter {row.name} is {value!r}; wanted {accepted.wanted}")
    if config.int8_mode not in INT8_MODES:
        modes = ", ".join(map(str, INT8_MODES))
        raise UnsupportedError(
            f"{where}: parameter int8_mode is {config.int8_mode}; this version runs {modes}"
        )
