"""The settings of a model and of the engine, frozen once they are read.

`ModelConfig` describes a model; the families of backend.models read it from `config.ini` and write it there.
`EngineConfig` describes how the engine runs; it is read here, from `config.pbtxt` of the `fastertransformer`
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Callable, TypeVar

from tridecode.backend.errors import ConfigError, UnsupportedError
from tridecode.backend.weight_layout import divides, share_size

DTYPES = ("fp32", "fp16", "bf16")
_MAX_RANKS = 1024  # that an error offers
VERIFY_MODES = ("sizes", "sampled", "full")
#: FasterTransformer's FT_SEQ_LEN_MAX: the limit of a model whose config.ini names none
DEFAULT_MAX_POSITIONS = 16384


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
    """The sizes of one layer of a pruned model (docs/pruning.md), of all ranks together.

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
        """Of all layers."""
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
        if found := _unshared_heads(sizes, tensor_para_size, where):
            most = min(sizes.num_heads, _MAX_RANKS)
            fitting = [str(n) for n in range(1, most + 1) if not _unshared_heads(sizes, n, where)]
            raise ConfigError(
                f"tensor_para_size = {tensor_para_size} {found}; wanted one of {', '.join(fitting)}"
            )


def _unshared_heads(sizes: ModelConfig, ranks: int, where: str) -> str:
    if not divides(sizes.num_heads, ranks):
        return f"does not divide head_num = {sizes.num_heads} of {where}"
    if not divides(sizes.num_kv_heads, ranks, shared=True):
        return f"does not divide kv_head_num = {sizes.num_kv_heads} of {where} and is not a multiple of it"
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
class EngineConfig:
    """How the engine runs, from the `parameters` of the fastertransformer model's config.pbtxt.

    The keys of the first group are FasterTransformer's, the others ours. None: chosen and logged at start-up.
    """

    tensor_para_size: int = 1
    pipeline_para_size: int = 1
    data_type: str = "fp32"
    int8_mode: int = 0

    device: str = "auto"  # "auto", "cpu", "cuda"
    weights: str = "files"  # or "random": of the model's shapes, for benchmarks without a checkpoint
    verify_weights: str = "sampled"  # files against manifest.json: "sizes", "sampled" (4 KiB a MiB) or "full"
    max_sequences: int = 64  # sequences that decode together
    max_queued_requests: int = 1024  # length of the queue; a request beyond it is answered UNAVAILABLE
    max_sequence_tokens: int | None = None  # prompt + output; None: what the model's positions allow
    max_step_tokens: int | None = None  # tokens of one step; longer prompts are computed in chunks
    block_tokens: int = 32  # KV-cache tokens of one block
    cache_bytes: int | None = None  # None: memory_fraction of what is free after loading and warm-up
    memory_fraction: float = 0.9
    max_bad_word_tokens: int = 256  # ids of all bad words of a sequence together
    max_stop_word_tokens: int = 1024
    request_timeout_s: float = 600.0  # deadline of a request that sets none
    step_timeout_s: float = 60.0  # a step that takes longer counts as hung
    start_timeout_s: float = 900.0  # loading and warming up, at most
    cuda_graphs: bool = True
    num_threads: int = 0  # CPU threads of the engine; 0: torch's own choice
    batch_invariant: bool = False  # CPU, fp32: log-probs do not depend on the other requests of a step
    lora_path: str = "none"  # folder of LoRA adapters, relative to config.pbtxt's; "none": none are served
    max_loras: int = 8  # adapters in memory; the least recently used one that is idle gives way
    max_lora_rank: int = 64

    extra: dict[str, str] = field(default_factory=dict)  # parameters for others than the engine


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
    known = {f.name: str(f.type).removesuffix(" | None") for f in fields(EngineConfig) if f.name != "extra"}
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


def _check_engine_config(config: EngineConfig, where: str) -> None:
    def demand(fine: bool, key: str, wanted: str) -> None:
        if not fine:
            raise ConfigError(f"{where}: parameter {key} is {getattr(config, key)!r}; wanted {wanted}")

    demand(config.data_type in DTYPES, "data_type", "one of " + ", ".join(DTYPES))
    demand(config.weights in ("files", "random"), "weights", "files or random")
    demand(config.verify_weights in VERIFY_MODES, "verify_weights", ", ".join(VERIFY_MODES))
    demand(config.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda")
    sizes = "tensor_para_size pipeline_para_size max_sequences max_queued_requests block_tokens"
    for key in (*sizes.split(), "max_loras", "max_lora_rank"):
        demand(getattr(config, key) >= 1, key, "1 or more")
    for key in ("max_sequence_tokens", "max_step_tokens", "cache_bytes"):
        demand(getattr(config, key) is None or getattr(config, key) >= 1, key, "1 or more, or auto")
    demand(0.0 < config.memory_fraction <= 1.0, "memory_fraction", "a number in (0, 1]")
    for key in ("request_timeout_s", "step_timeout_s", "start_timeout_s"):
        demand(getattr(config, key) > 0, key, "more than 0 seconds")
    if config.int8_mode != 0:
        raise UnsupportedError(f"{where}: parameter int8_mode is {config.int8_mode}; this version runs 0")
