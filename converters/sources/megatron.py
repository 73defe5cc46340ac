"""Checkpoints of Megatron-LM: mp_rank_XX[_YYY]/model_optim_rng.pt, one file a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tridecode.backend.base.checkpoint_files import read_json, require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.megatron_network import GptSettings, Piece, activation_of, gpt_checkpoint
from tridecode.converters.sources.pickle_limits import is_plain
from tridecode.converters.sources.torch_file import load, tensors_of
from tridecode.converters.sources.torch_pickle import Arguments, Region

#: folders of a rank: Megatron-LM's, with its pipeline rank if there are several, and NeMo's
RANK_FOLDER = re.compile(r"(?:mp_rank_(\d+)(?:_(\d+))?|tp_rank_(\d+)_pp_rank_(\d+))")
_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
_LATEST = "latest_checkpointed_iteration.txt"
_GPT2_END = 50256
#: argument -> GPT-2's value; a missing one had this default at the time
_NETWORK: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("learned_absolute",),
    "use_rotary_position_embeddings": (False,),
    "add_position_embedding": (True,),
    "normalization": ("LayerNorm",),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "add_bias_linear": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "num_experts": (None, 0, 1),
    "qk_layernorm": (False,),
    "heterogeneous_layers_config_path": (None,),
}


def find_megatron_directory(path: Path) -> Path | None:
    """The folder with the ranks' folders: `path`, or that of its latest iteration; None if it has none.

    Raises CheckpointError if it has several iterations and does not record the latest.
    """
    if rank_folders(path):
        return path
    if RANK_FOLDER.fullmatch(path.name) and any((path / name).is_file() for name in _FILES):
        return path.parent
    if (path / _LATEST).is_file():
        latest = require_file(path / _LATEST, 1000).read_text(encoding="utf-8", errors="replace").strip()
        name = latest if latest == "release" else f"iter_{int(latest):07d}" if latest.isdigit() else ""
        if not name or not rank_folders(path / name):
            raise CheckpointError(f"{path / _LATEST} says {latest[:80]!r}; {path} has no such checkpoint")
        return path / name
    found = [entry for entry in sorted(path.glob("*")) if entry.is_dir() and rank_folders(entry)]
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:5])
        raise CheckpointError(f"{path} holds the checkpoints {names}; name one of them")
    return found[0] if found else None


def rank_folders(path: Path) -> dict[tuple[int, int], Path]:
    """The folder of each (pipeline stage, tensor rank), in this order."""
    found = {}
    for folder in sorted(path.glob("*_rank_*")):
        match = RANK_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            found[rank_of(match)] = folder
        elif re.fullmatch(r"mp_rank_\d+_\d+_\d+", folder.name):
            raise UnsupportedError(f"{folder} is of expert-parallel ranks, which this version does not read")
    return dict(sorted(found.items()))


def rank_of(match: re.Match[str]) -> tuple[int, int]:
    """(pipeline stage, tensor rank) of a RANK_FOLDER."""
    return int(match[2] or match[4] or 0), int(match[1] or match[3] or 0)


def check_ranks(
    ranks: Iterable[tuple[int, int]], where: Path, tensor: object, pipeline: object
) -> tuple[int, int]:
    """The number of (stages, tensor ranks).

    Raises CheckpointError unless there is one piece of each, as many as the settings state (if they are
    numbers).
    """
    found = set(ranks)
    stages, tensor_ranks = (max(place) + 1 for place in zip(*found))
    for key, size, said in (("tensor", tensor_ranks, tensor), ("pipeline", stages, pipeline)):
        if isinstance(said, int) and said != size:
            raise CheckpointError(
                f"{where} has pieces of {size} {key}-parallel ranks; its settings say {said}"
            )
    for stage in range(stages):
        for rank in range(tensor_ranks):
            if (stage, rank) not in found:
                raise CheckpointError(f"{where} has no piece of tensor rank {rank} of pipeline stage {stage}")
    return stages, tensor_ranks


def open_megatron(path: Path, num_heads: int | None = None) -> Checkpoint:
    """A folder of ranks' folders; tensors are merged when they are read.

    num_heads: for a checkpoint that holds no arguments. Raises CheckpointError where pieces are missing or do
    not fit, UnsupportedError for arguments of another network than GPT-2's.
    """
    trees = {rank: _load(folder) for rank, folder in rank_folders(path).items()}
    first = next(iter(trees.values()))
    arguments = first.get("args")
    values: Mapping[str, Any] = arguments.values if isinstance(arguments, Arguments) else {}
    tensor = values.get("tensor_model_parallel_size", values.get("model_parallel_size"))
    num_stages, ranks = check_ranks(trees, path, tensor, values.get("pipeline_model_parallel_size"))
    stages = [
        [tensors_of(trees[stage, rank].get(chunk, {}), str(path)) for rank in range(ranks)]
        for chunk in _chunks(first)
        for stage in range(num_stages)
    ]
    version = first.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)) or not 0 <= version < 4:
        found = str(version)[:80] if is_plain(version) else f"of the type {type(version).__name__}"
        raise CheckpointError(f"{path} has checkpoint_version {found}; wanted 0 to 3")
    for key, wanted in _NETWORK.items():
        if key in values and values[key] not in wanted:
            raise UnsupportedError(
                f"{path} has {key} = {str(values[key])[:80]}; of Megatron's networks this version runs "
                f"{key} = {wanted[0]}"
            )
    settings = gpt_settings(values, stages, float(version), path, num_heads)
    notes = [] if values else [f"{path} holds no arguments: layernorm_eps is taken as 1e-05, GELU as tanh"]
    padded = values.get("padded_vocab_size")
    rows = sum(
        tensor.shape[0]
        for piece in stages[0]
        for name, tensor in piece.items()
        if name.endswith("embedding.word_embeddings.weight")
    )
    if isinstance(padded, int) and padded != rows:
        raise CheckpointError(f"{path} has {rows} rows of word embeddings; its padded_vocab_size is {padded}")
    return gpt_checkpoint(path, stages, settings, end_id(path), None, notes)


def _load(folder: Path) -> dict[str, Any]:
    file = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {_FILES[0]}")
    tree = load(Region.of_file(require_file(file)))
    if not isinstance(tree, dict) or not _chunks(tree):
        raise CheckpointError(f"{file} holds no model; wanted a checkpoint of Megatron-LM")
    return tree


def _chunks(tree: Mapping[str, Any]) -> list[str]:
    """The keys of its models: "model", or "model0", "model1", … of an interleaved pipeline."""
    if "model" in tree:
        return ["model"]
    numbered = [int(key[5:]) for key in tree if isinstance(key, str) and re.fullmatch(r"model\d{1,4}", key)]
    return [f"model{number}" for number in sorted(numbered)]


def gpt_settings(
    values: Mapping[str, Any],
    stages: Sequence[Sequence[Piece]],
    version: float,
    path: Path,
    num_heads: int | None,
) -> GptSettings:
    """Return the settings from the arguments, else from the shapes, which do not show the number of heads."""
    merged = {name: tensor for ranks in stages for name, tensor in ranks[0].items()}
    positions = next((t.shape for name, t in merged.items() if "position_embeddings" in name), None)
    up = next(
        (t.shape for name, t in merged.items() if re.search(r"(_h_to_4h|linear_fc1)\.weight$", name)), None
    )
    if positions is None or up is None or len(positions) != 2 or len(up) != 2:
        raise CheckpointError(f"{path} has no position embeddings or no MLP; wanted Megatron's GPT")
    heads = num_heads or values.get("num_attention_heads")
    if heads is None:
        raise CheckpointError(f"{path} holds no arguments; name its number of attention heads (--num-heads)")
    layers = {
        (place, match[1])
        for place, ranks in enumerate(stages)
        for name in ranks[0]
        if (match := re.search(r"layers\.(\d+)\.", name))
    }
    heads = _integer({"num_attention_heads": heads}, "num_attention_heads", 0, path)
    hidden = _integer(values, "hidden_size", positions[1], path)
    head_size = values.get("kv_channels")
    if head_size is not None and _integer(values, "kv_channels", 1, path) * heads != hidden:
        wanted = f"hidden_size / num_attention_heads, {hidden / heads:g}"
        raise UnsupportedError(f"{path} has kv_channels = {str(head_size)[:80]}; this version runs {wanted}")
    eps = values.get("layernorm_epsilon", values.get("norm_epsilon", 1e-5))
    return GptSettings(
        num_layers=_integer(values, "num_layers", len(layers), path),
        hidden_size=hidden,
        num_heads=heads,
        mlp_size=_integer(values, "ffn_hidden_size", up[0] * len(stages[0]), path),
        eps=float(eps) if isinstance(eps, float) or eps in (0, 1) else -1.0,
        activation=activation_of(values, path) if values else "gelu_new",
        version=version,
        tied=not values.get("untie_embeddings_and_output_weights", False),
        norm_plus_one=bool(values.get("apply_layernorm_1p", False)),
    )


def _integer(values: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise CheckpointError(f"{path} has {key} = {str(value)[:80]}; wanted 1 or more")
    return value


def end_id(path: Path) -> int | None:
    """The id of <|endoftext|> in a vocab.json next to the ranks, else GPT-2's, as FasterTransformer does."""
    if not (path / "vocab.json").is_file():
        return _GPT2_END
    found = read_json(path / "vocab.json").get("<|endoftext|>")
    return found if isinstance(found, int) and found >= 0 else None
