"""Finds the matrices of a layer that share an input, and the tensors that can undo a scale per input.

The network is unchanged if the weights of an input are multiplied by a scale and the tensors that produce the
input are divided by it: a norm's weight and bias, or columns of a matrix and of its bias. Names and shapes
are those of a weight directory; matrices are (in, out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.weights.layout import WeightSpec

#: forms of the residual in which the output of the norms before attention and MLP goes to their matrices only
_NORM_FEEDS_MATRICES = ("sequential", "parallel", "sandwich")
#: norms before attention and MLP: the first that a layer has
_ATTENTION_NORMS = ("ln_attn", "input_layernorm")
_MLP_NORMS = ("ln_mlp", "pre_feedforward_layernorm", "post_attention_layernorm", *_ATTENTION_NORMS)


@dataclass(frozen=True)
class SharedInput:
    """Matrices over one input.

    makers: tensors that produce the input with columns first to stop - 1 of their last axis; empty: a scale
    cannot be undone.
    """

    matrices: tuple[str, ...]
    makers: tuple[str, ...] = ()
    first: int = 0
    stop: int = 0


def layer_matrices(specs: Sequence[WeightSpec], layer: int) -> list[WeightSpec]:
    """The matrices of a layer; norms of heads, which StableLM has as (heads, head size), are none."""
    return [
        spec
        for spec in specs
        if spec.layer == layer and len(spec.shape) == 2 and not spec.name.endswith("_norm.weight")
    ]


def shared_inputs(config: ModelConfig, specs: Sequence[WeightSpec], layer: int) -> list[SharedInput]:
    """The matrices of a layer by their inputs."""
    prefix, sizes = f"model.layers.{layer}", config.of_layer(layer)
    shapes = {spec.name: spec.shape for spec in specs if spec.layer == layer}
    qkv, dense = f"{prefix}.attention.query_key_value", f"{prefix}.attention.dense.weight"
    mlp = [spec for spec in layer_matrices(specs, layer) if spec.name.startswith(f"{prefix}.mlp.")]
    ups = tuple(spec.name for spec in mlp if spec.axis == 1)  # a gate precedes its values
    (down,) = (spec.name for spec in mlp if spec.axis == 0)

    before_attention = _first_norm(prefix, _ATTENTION_NORMS, shapes)
    before_mlp = _first_norm(prefix, _MLP_NORMS, shapes)
    if config.residual not in _NORM_FEEDS_MATRICES:
        before_attention = before_mlp = ""
    if before_attention and before_attention == before_mlp:
        shared = [_made_by(before_attention, (f"{qkv}.weight", *ups), shapes)]
    else:
        shared = [_made_by(before_attention, (f"{qkv}.weight",), shapes), _made_by(before_mlp, ups, shapes)]

    values = sizes.num_heads * sizes.head_size  # inputs of dense, if no group of heads shares them
    if sizes.num_kv_heads == sizes.num_heads and not getattr(config, "qkv_limit", 0):
        shared.append(_made_by(qkv, (dense,), shapes, 2 * values))
    else:
        shared.append(SharedInput((dense,)))
    gated = len(ups) == 2  # the values are multiplied by the activated gate, not activated themselves
    shared.append(
        _made_by(ups[1].removesuffix(".weight"), (down,), shapes) if gated else SharedInput((down,))
    )
    return shared


def _first_norm(prefix: str, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """ "" if the layer's norms have no weights."""
    return next((f"{prefix}.{name}" for name in names if f"{prefix}.{name}.weight" in shapes), "")


def _made_by(
    maker: str, matrices: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]], first: int = 0
) -> SharedInput:
    """Return the input produced by `<maker>.weight` and its bias, from column `first` on; maker "": by
    neither.
    """
    makers = tuple(name for name in (f"{maker}.weight", f"{maker}.bias") if name in shapes)
    return SharedInput(matrices, makers, first, shapes[makers[0]][-1]) if makers else SharedInput(matrices)
