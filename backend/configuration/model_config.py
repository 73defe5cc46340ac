"""`ModelConfig`: the immutable shape of a model, and checks that ranks can share it.

The families of backend.models read it from `config.ini` and write it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.layout import divides, share_size, stage_layers
from tridecode.backend.weights.quantization import Quantization

DTYPES = ("fp32", "fp16", "bf16")
_MAX_RANKS = 1024  # numbers of ranks that an error suggests
#: FasterTransformer's FT_SEQ_LEN_MAX: the limit if config.ini has none
DEFAULT_MAX_POSITIONS = 16384
#: largest number of positions: angles are computed in float32, which cannot represent odd integers beyond it
MAX_POSITIONS = 1 << 24


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. size: rotated dimensions of a head; theta: base; scaling: one of SCALINGS.

    factor: used by all scalings except longrope. low_freq_factor, high_freq_factor: llama3. beta_fast,
    beta_slow, truncate: yarn. short_factors, long_factors: longrope, size / 2 of each. recompute: longrope;
    a sequence that grows beyond original_max_positions is recomputed with the long factors.
    attention_factor: cos and sin are multiplied by it. interleaved: each even dimension is rotated against
    the next (GPT-J); else half against half. An odd size is rounded up, but its frequencies are not those of
    the next even one. Source: Su et al. 2021; the scalings are those of transformers' modeling_rope_utils.
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
    """The sizes of one layer of a pruned model (docs/guides/pruning.md), over all ranks.

    kept_heads: the index of each query head before pruning, ascending, which determines its ALiBi slope; ():
    not known.
    """

    num_heads: int
    num_kv_heads: int
    mlp_size: int
    kept_heads: tuple[int, ...] = ()


_Config = TypeVar("_Config", bound="ModelConfig")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Sizes are of the whole model, not of a rank.

    num_heads, num_kv_heads, mlp_size: for a pruned model, the sizes before pruning; `of_layer` returns a
    layer's own.
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
    weight_dtype: str = "fp32"  # dtype of the files; "fp32", "fp16" or "bf16"
    activation: str = "gelu_tanh"  # "gelu_tanh", "gelu" (erf), "relu" or "silu"
    rope: RopeConfig | None = None
    attention_bias: bool = True  # bias of query_key_value, and of dense unless dense_bias differs
    dense_bias: bool | None = None  # None: as attention_bias
    mlp_bias: bool = True
    tied_head: bool = True  # no model.lm_head.weight.bin: the head is the word embedding
    head_bias: bool = False  # model.lm_head.bias.bin
    #: "sequential": x += attention(norm(x)), then x += mlp(norm(x)); "parallel": both from one x;
    #: "from_norm": as sequential, but each is added to norm(x), not to x; "post_norm": x = norm(x +
    #: attention(x)), then x = norm(x + mlp(x)); "sandwich": x += norm(attention(norm(x))), the MLP likewise
    residual: str = "sequential"
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_size)
    scale_by_layer: bool = False  # layer l (from 0) divides its scale by l + 1
    #: tokens that a query of each layer sees, itself included; 0: all; empty: all in every layer
    windows: tuple[int, ...] = ()
    layer_sizes: tuple[LayerSizes, ...] = ()  # sizes of each layer of a pruned model; (): all as above
    # quantisation of the layers' matrices; None: all files have weight_dtype
    quantization: Quantization | None = None
    more_end_ids: tuple[int, ...] = ()  # further tokens that end a text, as end_id does

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def of_layer(self: _Config, layer: int) -> _Config:
        """Return this config with the sizes of one layer."""
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
        """Return this config with the largest sizes of any layer, for buffers that layers share."""
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
        """Return the largest share of an MLP, over all layers, that a tensor rank holds, padding included."""
        layers = self.layer_sizes or (self,)
        return max(share_size(layer.mlp_size, tensor_size, padded=True) for layer in layers)

    def head_numbers(self, layer: int) -> Sequence[int]:
        """Return the index before pruning of each query head of a layer."""
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
        """longrope: a longer prompt is rotated entirely with the long factors; 0: another scaling."""
        return max((r.original_max_positions for r in self.ropes if r.scaling == "longrope"), default=0)

    @property
    def recomputes_long(self) -> bool:
        return any(rope.recompute for rope in self.ropes)


def check_tensor_size(config: ModelConfig, tensor_para_size: int) -> None:
    """Raise ConfigError unless the tensor ranks can share the heads evenly.

    A matrix may be divisible even if its heads are not: 3 heads of 16 have 48 columns, which 2 divides. Fewer
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
    """Raise ConfigError if a pipeline stage would have no layer.

    Stages have ceil(layers / stages) layers, the last one the rest: of 6 layers in 4 stages of 2, the last
    stage would be empty.
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
    """Raise ConfigError, which suggests what fits, unless every rank gets an equal share of the heads and at
    least one layer.
    """
    check_tensor_size(config, tensor_para_size)
    check_stages(config.num_layers, pipeline_para_size, config.model_name)


def _unshared_heads(num_heads: int, num_kv_heads: int, ranks: int, where: str) -> str:
    if not divides(num_heads, ranks):
        return f"does not divide head_num = {num_heads} of {where}"
    if not divides(num_kv_heads, ranks, shared=True):
        return f"does not divide kv_head_num = {num_kv_heads} of {where} and is not a multiple of it"
    return ""
