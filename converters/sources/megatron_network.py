"""The GPT network of Megatron-LM and NeMo: pieces of tensor and pipeline ranks as one GPT-2 of transformers.

Sources: Megatron-LM's checkpointing.py (fix_query_key_value_ordering for the versions) and its layers; the
activation follows transformers' convert_megatron_gpt2_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.references.state import state_reference
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.torch_pickle import StoredTensor

#: Megatron's names of old and new versions (its core's last), without prefixes -> transformers'
_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv.layer_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1.layer_norm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_WHOLE = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "output_layer.weight": "lm_head.weight",
}
_FINAL = "transformer.ln_f"
#: the axis of (out, in) matrices and of biases that is split over tensor ranks
_SPLIT = {
    "transformer.wte.weight": 0,
    "lm_head.weight": 0,
    "attn.c_attn.weight": 0,
    "attn.c_attn.bias": 0,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}
_PREFIX = re.compile(r"^(?:(?:model|module|language_model)\.)+")
_LAYER_NAME = re.compile(r"^(?:transformer|encoder|decoder)\.layers\.(\d+)\.(.+?)[._](weight|bias)$")
_FINAL_NAME = re.compile(r"^(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(weight|bias)$")
#: the last pipeline stage's copy of the word embeddings, and tensors determined by the settings
_IGNORED = re.compile(
    r"^word_embeddings(_for_head)?\.weight$|rotary_emb|_extra_state|\.attention_mask|masked_bias$"
)


@dataclass(frozen=True)
class GptSettings:
    """Settings of the network.

    version: the checkpoint's, which determines the order of query_key_value's rows. norm_plus_one: the files
    hold LayerNorm's weights minus one. positions: None: as many as stored.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    eps: float
    activation: str
    version: float
    tied: bool = True
    norm_plus_one: bool = False


Piece = Mapping[str, StoredTensor]  # of one rank, by Megatron's names


class GptTensors:
    """The tensors of a GPT-2 of transformers, merged of the pieces when they are read.

    stages: the pieces of each pipeline stage, in the order of their layers; each has those of its tensor
    ranks. Raises CheckpointError for a tensor that is unknown, missing or of another shape.
    """

    def __init__(self, stages: Sequence[Sequence[Piece]], settings: GptSettings, where: Path):
        self.settings, self.where = settings, where
        self._pieces: dict[str, list[StoredTensor]] = {}
        layers = 0
        for ranks in stages:
            layers += self._add_stage(ranks, layers)
        if layers != settings.num_layers:
            raise CheckpointError(f"{where} holds {layers} layers; its settings say {settings.num_layers}")
        self.shapes = {name: self._shape(name) for name in self._pieces}

    def _add_stage(self, ranks: Sequence[Piece], first_layer: int) -> int:
        """Adds a stage; returns its number of layers."""
        names = [{self._name(own, first_layer): own for own in piece if not _ignored(own)} for piece in ranks]
        for rank, known in enumerate(names):
            if set(known) != set(names[0]):
                odd = sorted(set(known) ^ set(names[0]))[0]
                raise CheckpointError(f"{self.where}: tensor ranks 0 and {rank} do not both have {odd}")
        for name in names[0]:
            self._pieces.setdefault(name, [piece[known[name]] for piece, known in zip(ranks, names)])
        layers = {int(name.split(".")[2]) for name in names[0] if name.startswith("transformer.h.")}
        if layers != set(range(first_layer, first_layer + len(layers))):
            raise CheckpointError(
                f"{self.where} has layers {sorted(layers)[:8]}; wanted them from {first_layer}"
            )
        return len(layers)

    def _name(self, own: str, first_layer: int) -> str:
        """transformers' name of one of Megatron's."""
        bare = _PREFIX.sub("", own)
        if bare in _WHOLE:
            return _WHOLE[bare]
        if match := _FINAL_NAME.match(bare):
            return f"{_FINAL}.{match[1]}"
        match = _LAYER_NAME.match(bare)
        if match and match[2] in _LAYER:
            return f"transformer.h.{first_layer + int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
        raise CheckpointError(f"{self.where} has {own}, which is not a known tensor of Megatron's GPT")

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._pieces[name][0].shape)
        if any(list(piece.shape) != shape for piece in self._pieces[name]):
            raise CheckpointError(f"{self.where}: the pieces of {name} have different shapes")
        axis = _axis(name)
        if axis is not None:
            shape[axis] *= len(self._pieces[name])
        return tuple(reversed(shape) if _is_matrix(name) else shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0].dtype

    def read(self, name: str) -> Tensor:
        axis, pieces = _axis(name), self._pieces[name]
        if axis is None:  # the same on every tensor rank
            tensor = pieces[0].read()
        elif ".attn.c_attn." in name:
            parts = [self._heads_apart(piece.read(), len(pieces)) for piece in pieces]  # (3, H / t, D, ...)
            joined = torch.cat(parts, dim=1)
            tensor = joined.reshape(-1, *joined.shape[3:])
        else:
            tensor = (
                torch.cat([piece.read() for piece in pieces], dim=axis) if pieces[1:] else pieces[0].read()
            )
        if self.settings.norm_plus_one and name.endswith(".weight") and "ln_" in name:
            tensor = tensor + 1
        return tensor.t() if _is_matrix(name) else tensor

    def _heads_apart(self, rows: Tensor, ranks: int) -> Tensor:
        """query_key_value's rows of one rank as (3, heads, head size, ...)."""
        heads, version = self.settings.num_heads // ranks, self.settings.version
        rest = rows.shape[1:]
        if version >= 2:
            return rows.reshape(heads, 3, -1, *rest).transpose(0, 1)
        if version >= 1:
            return rows.reshape(heads, -1, 3, *rest).movedim(2, 0)
        return rows.reshape(3, heads, -1, *rest)


def _ignored(own: str) -> bool:
    return _IGNORED.search(_PREFIX.sub("", own)) is not None


def _axis(name: str) -> int | None:
    return _SPLIT.get(name, _SPLIT.get(".".join(name.split(".")[3:])))


def _is_matrix(name: str) -> bool:
    """Return whether transformers' GPT-2 stores it as (in, out), the transpose of Megatron's."""
    return ".attn.c_" in name and name.endswith("weight") or ".mlp.c_" in name and name.endswith("weight")


def gpt_checkpoint(
    path: Path,
    stages: Sequence[Sequence[Piece]],
    settings: GptSettings,
    end_id: int | None,
    tokenizer_dir: Path | None,
    notes: list[str],
) -> Checkpoint:
    """The Checkpoint of Megatron's GPT. Raises CheckpointError where pieces and settings do not fit."""
    if settings.num_heads < 1 or settings.hidden_size % settings.num_heads:
        found = f"hidden_size {settings.hidden_size} and {settings.num_heads} heads"
        raise CheckpointError(f"{path} has {found}; wanted a multiple of the heads")
    ranks = len(stages[0])
    if settings.num_heads % ranks:
        raise CheckpointError(
            f"{path} has {settings.num_heads} heads, which its {ranks} tensor ranks do not divide"
        )
    tensors = GptTensors(stages, settings, path)
    for name in (*_WHOLE.values(), f"{_FINAL}.weight"):
        if name not in tensors.shapes and not (name == "lm_head.weight" and settings.tied):
            raise CheckpointError(f"{path} has no {name} (in transformers' names)")
    vocab_size = tensors.shapes["transformer.wte.weight"][0]
    ends = [end_id] if end_id is not None and end_id < vocab_size else []
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=tensors.shapes["transformer.wpe.weight"][0],
        n_embd=settings.hidden_size,
        n_layer=settings.num_layers,
        n_head=settings.num_heads,
        n_inner=settings.mlp_size,
        activation_function=settings.activation,
        layer_norm_epsilon=settings.eps,
        tie_word_embeddings=settings.tied,
        bos_token_id=ends[0] if ends else None,
        eos_token_id=ends[0] if ends else None,
    )
    return Checkpoint(
        path,
        config,
        tensors,
        ends[0] if ends else None,
        ends,
        reference=state_reference(config, tensors),
        tokenizer_dir=tokenizer_dir or path,
        notes=notes,
    )


def activation_of(values: Mapping[str, object], where: Path) -> str:
    """transformers' name of the MLP's activation, from Megatron's arguments or NeMo's settings."""
    name = values.get("activation", "gelu")
    fused = values.get("bias_gelu_fusion", values.get("bias_activation_fusion", True))
    if name in ("relu", "squared-relu") or values.get("squared_relu"):
        if name == "relu":
            return "relu"
        raise UnsupportedError(f"{where} has the activation squared ReLU; this version runs gelu and relu")
    if name != "gelu" or values.get("swiglu"):
        raise UnsupportedError(
            f"{where} has the activation {'swiglu' if values.get('swiglu') else name}; this version runs "
            "gelu and relu of Megatron's networks"
        )
    if values.get("openai_gelu"):
        return "gelu_new"
    return "gelu_fast" if fused and not values.get("onnx_safe") else "gelu"
