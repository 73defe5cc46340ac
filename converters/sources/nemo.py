"""NeMo's archives, .nemo: a tar of model_config.yaml and model_weights.ckpt, one of these a rank.

Those of prompt learning hold tables of virtual tokens, for the model of another archive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import yaml

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.prompts import PromptTable
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.archive import Archive
from tridecode.converters.sources.megatron import RANK_FOLDER, check_ranks, end_id, gpt_settings, rank_of
from tridecode.converters.sources.megatron_network import gpt_checkpoint
from tridecode.converters.sources.torch_file import load, tensors_of
from tridecode.converters.sources.torch_pickle import StoredTensor

CONFIG_FILE = "model_config.yaml"
_WEIGHTS = "model_weights.ckpt"
_MAX_CONFIG_BYTES = 128 << 10  # of model_config.yaml, which has about 10 kB; PyYAML takes 10 us a byte
_MAX_CONFIG_NODES = 20_000
_PROMPT = re.compile(r"(?:.*\.)?prompt_table\.(.+)\.prompt_embeddings\.weight$")
#: other contents of a p-tuning archive: the network that generated the tables, and the frozen model's names
_PROMPT_TRAINING = re.compile(r"(?:^|\.)(prompt_encoder|frozen_model)\.")
_TOKENIZER_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt", "model": "tokenizer.model"}
_NETWORK: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("learned_absolute",),
    "normalization": ("layernorm", "layernorm1p", "low_precision_layernorm"),
    "transformer_block_type": ("pre_ln",),
    "bias": (True,),
    "num_moe_experts": (None, 0, 1),
    "virtual_pipeline_model_parallel_size": (None, 1),
    "headscale": (False,),
}


def open_nemo(path: Path) -> Checkpoint:
    """An archive, or its unpacked folder. Tensors are read in place, unless the archive is compressed.

    Raises CheckpointError for what is damaged or holds prompts only, UnsupportedError for another network
    than GPT-2's.
    """
    archive = Archive(path)
    values = _config(archive)
    if "target" in values and "gpt" not in str(values["target"]).lower():
        raise UnsupportedError(
            f"{path} is of the class {str(values['target'])[:120]}; this version reads GPT's"
        )
    pieces = _pieces(archive)
    tables = _prompt_tables(pieces, values)
    stage_count, ranks = check_ranks(
        pieces, path, values.get("tensor_model_parallel_size"), values.get("pipeline_model_parallel_size")
    )
    stages = [[_network_only(pieces[stage, rank]) for rank in range(ranks)] for stage in range(stage_count)]
    if tables and not any(piece for ranks_of in stages for piece in ranks_of):
        raise CheckpointError(
            f"{path} holds prompt tables only: name it with --prompts, its model with --model"
        )
    _check_network(values, path)
    named = {
        **values,
        "untie_embeddings_and_output_weights": not values.get("share_embeddings_and_output_weights", True),
        "apply_layernorm_1p": values.get("normalization") == "layernorm1p",
    }
    settings = gpt_settings(named, stages, 3.0, path, None)
    tokenizer_dir = _tokenizer_files(archive, values)
    checkpoint = gpt_checkpoint(path, stages, settings, _end_id(tokenizer_dir), tokenizer_dir, [])
    checkpoint.prompts, checkpoint.keep = tables, archive
    return checkpoint


def open_prompts(path: Path) -> list[PromptTable]:
    """The tables of an archive of prompt learning. Raises CheckpointError if it has none."""
    archive = Archive(path)
    tables = _prompt_tables(_pieces(archive), _config(archive))
    if not tables:
        raise CheckpointError(f"{path} holds no prompt tables; wanted an archive of prompt learning")
    return tables


class _Loader(yaml.SafeLoader):
    """YAML without merge keys (<<), which multiply."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "it has merge keys", node.start_mark)


def _is_small(values: Any) -> bool:
    """Return whether a tree has few nodes, counted once per alias that refers to them."""
    stack, count = [values], 0
    while stack:
        node = stack.pop()
        count += 1
        if count > _MAX_CONFIG_NODES:
            return False
        stack += list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return True


def _config(archive: Archive) -> dict[str, Any]:
    try:
        text = archive.read(CONFIG_FILE, _MAX_CONFIG_BYTES).decode("utf-8")
        values = yaml.load(text, Loader=_Loader)
        if not _is_small(values):
            raise ValueError(f"its aliases make more than {_MAX_CONFIG_NODES:,} values of it")
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        found = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{archive.path}: {CONFIG_FILE} is not valid YAML: {found}") from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{archive.path}: {CONFIG_FILE} holds a {type(values).__name__}; wanted settings"
        )
    # an OmegaConf interpolation such as ${multiply:4,${.hidden_size}}; the shapes determine it, too
    return {
        key: value
        for key, value in values.items()
        if isinstance(key, str) and not (isinstance(value, str) and "${" in value)
    }


def _pieces(archive: Archive) -> dict[tuple[int, int], dict[str, StoredTensor]]:
    """The tensors of each (pipeline stage, tensor rank), by NeMo's names."""
    found = {}
    for name, region in archive.members.items():
        folder, _, file = name.rpartition("/")
        match = RANK_FOLDER.fullmatch(folder)
        if file == _WEIGHTS and (match or not folder):
            found[rank_of(match) if match else (0, 0)] = region
    if not found:
        if any(name.startswith("model_weights/") or "/model_weights/" in name for name in archive.members):
            raise UnsupportedError(
                f"{archive.path} has a distributed checkpoint (model_weights/); this version reads {_WEIGHTS}"
            )
        raise CheckpointError(f"{archive.path} has no {_WEIGHTS}")
    return {
        rank: tensors_of(load(region), region.name)
        for rank, region in sorted(found.items(), key=lambda i: i[0])
    }


def _prompt_tables(
    pieces: Mapping[tuple[int, int], Mapping[str, StoredTensor]], values: Mapping[str, Any]
) -> list[PromptTable]:
    """Return the tables in the order of task_templates, which numbers the tasks; others follow."""
    found = {
        match[1]: PromptTable(match[1], tensor.shape, tensor.read)
        for piece in pieces.values()
        for name, tensor in piece.items()
        if (match := _PROMPT.match(name))
    }
    templates = values.get("task_templates")
    named = [
        template.get("taskname")
        for template in (templates if isinstance(templates, list) else [])
        if isinstance(template, dict)
    ]
    return [found.pop(task) for task in named if task in found] + list(found.values())


def _network_only(piece: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {
        name: tensor
        for name, tensor in piece.items()
        if not (_PROMPT.match(name) or _PROMPT_TRAINING.search(name))
    }


def _check_network(values: Mapping[str, Any], path: Path) -> None:
    groups, heads = values.get("num_query_groups"), values.get("num_attention_heads")
    if groups not in (None, heads):
        raise UnsupportedError(f"{path} has num_query_groups = {str(groups)[:80]}; this version runs {heads}")
    for key, wanted in _NETWORK.items():
        if key in values and values[key] not in wanted:
            raise UnsupportedError(
                f"{path} has {key} = {str(values[key])[:80]}; of NeMo's networks this version runs "
                f"{key} = {wanted[0]}"
            )


def _tokenizer_files(archive: Archive, values: Mapping[str, Any]) -> Path:
    """The members that the settings name as the tokenizer's, in a folder, under transformers' names."""
    named = values.get("tokenizer")
    for key, target in _TOKENIZER_FILES.items():
        member = named.get(key) if isinstance(named, dict) else None
        if isinstance(member, str) and member.removeprefix("nemo:") in archive.members:
            data = archive.read(member.removeprefix("nemo:"), MAX_JSON_BYTES)
            (archive.folder / target).write_bytes(data)
    return archive.folder


def _end_id(tokenizer_dir: Path) -> int | None:
    model = tokenizer_dir / "tokenizer.model"
    if not model.exists():
        return end_id(tokenizer_dir)
    try:
        found = sentencepiece.SentencePieceProcessor(model_file=str(model)).eos_id()
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{model.name} is not a sentencepiece model: {error}") from None
    return found if found >= 0 else None
