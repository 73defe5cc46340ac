"""Loads an engine from a weight directory: peers, weights, prompt tables, adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tridecode import kernels
from tridecode.backend import models
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.adapters.channel import AdapterChannel
from tridecode.backend.engine.adapters.store import AdapterStore, Place
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.draft_loading import draft_config
from tridecode.backend.engine.device.drafters.trained_loading import load_trained
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.file_weights import DTYPES, FileWeights, unrounded_weights
from tridecode.backend.engine.device.memory import check_background
from tridecode.backend.engine.device.parts.table import background_kinds
from tridecode.backend.engine.device.preparation import Progress, build_engine
from tridecode.backend.engine.device.random_weights import RandomWeights
from tridecode.backend.engine.host_tier.opening import open_store
from tridecode.backend.engine.prompt_tables.store import load_tasks, prompt_limits
from tridecode.backend.engine.ranks.parallel import ProcessRanks, Ranks
from tridecode.backend.engine.ranks.peer_memory import join_peers
from tridecode.backend.engine.ranks.vocab_share import share_vocabulary
from tridecode.backend.models.prompt_ini import read_prompt_section
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import stage_layers
from tridecode.backend.weights.quantization import stored_specs
from tridecode.backend.weights.reader import WeightReader
from tridecode.kernels.ops import Ops

#: types of devices whose tensor ranks map each other's memory
PEER_DEVICES = frozenset({"cuda"})


def load_engine(
    directory: Path,
    model: ModelConfig,
    config: EngineConfig,
    ranks: Ranks,
    device: torch.device,
    progress: Progress | None = None,
    phase: Progress = lambda what: None,
    host_fd: int | None = None,
) -> Engine:
    """Return an engine over the weight files of `directory`, ready for its first step. Collective.

    config: resolved. progress: called with the name of each tensor. phase: called with the name of each phase
    as it begins. host_fd: memory file of the host tier, if config.host_cache_bytes is not 0; None: a new one.
    Raises WeightFileError, ConfigError, UnsupportedError.
    """
    dtype, ops = DTYPES[config.data_type], kernels.select(device, config.batch_invariant)
    if background_kinds(config):
        check_background(model, config, device)
    open_host = None
    if config.has_host_tier:
        open_host = partial(open_store, directory=directory, fd=host_fd)
    has_peers = False
    if device.type in PEER_DEVICES and ranks.tensor_size > 1:
        ranks.barrier("the start of the joining of peers")  # a barrier with a time limit and a diagnosis
        phase("the joining of peers")
        has_peers = map_peers(ranks, ops, config, model)
    specs = models.family(model.family).weight_specs(model)
    specs = share_vocabulary(specs, ranks.tensor_size, device.type, has_peers)
    place, rounding = (ranks.tensor_rank, ranks.tensor_size), (config.int8_mode, config.head_mode)
    trained = load_trained(config, model, directory)
    if config.weights == "random":
        made = RandomWeights(specs, 0, *place, dtype, ops, device, model.quantization, *rounding)
        drafting = _open_draft(model, config, ranks, ops, device, has_peers, progress)
        arguments = ranks, device, None, phase, open_host, drafting, trained
        engine = build_engine(model, config, made, ops, *arguments)
        engine.state.adapters = _open_adapters(engine.state, directory, made)
        return engine
    mine = stage_layers(model.num_layers, ranks.stage, ranks.num_stages)
    specs = [spec for spec in specs if spec.layer is None or spec.layer in mine]
    phase(f"verifying weights ({config.verify_weights})")
    reader = WeightReader(directory, model)
    reader.verify(config.verify_weights, stored_specs(specs, model.quantization))
    weights = FileWeights(reader, specs, *place, dtype, ops, device, progress, *rounding)
    drafting = None
    try:
        others = partial(unrounded_weights, directory, config, ops, device)
        drafting = _open_draft(model, config, ranks, ops, device, has_peers, progress)
        engine = build_engine(
            model, config, weights, ops, ranks, device, others, phase, open_host, drafting, trained
        )
    finally:
        weights.close()
        if drafting is not None and isinstance(drafting[1], FileWeights):
            drafting[1].close()
    phase("loading prompt tables and adapters")
    _load_prompt_tables(engine.state, directory, reader)
    engine.state.adapters = _open_adapters(engine.state, directory, weights)
    return engine


def _open_draft(
    model: ModelConfig,
    config: EngineConfig,
    ranks: Ranks,
    ops: Ops,
    device: torch.device,
    has_peers: bool,
    progress: Progress | None,
) -> tuple[ModelConfig, Weights] | None:
    """Return the config and the open weights of the draft model, if one is configured.

    Raises ConfigError and WeightFileError, which name its folder.
    """
    draft = draft_config(config, model)
    if draft is None:
        return None
    specs = models.family(draft.family).weight_specs(draft)
    specs = share_vocabulary(specs, ranks.tensor_size, device.type, has_peers)
    place, rounding = (ranks.tensor_rank, ranks.tensor_size), (config.int8_mode, config.head_mode)
    dtype = DTYPES[config.data_type]
    if config.weights == "random":
        return draft, RandomWeights(specs, 1, *place, dtype, ops, device, draft.quantization, *rounding)
    reader = WeightReader(Path(config.draft_path), draft)
    reader.verify(config.verify_weights, stored_specs(specs, draft.quantization))
    return draft, FileWeights(reader, specs, *place, dtype, ops, device, progress, *rounding)


def map_peers(ranks: Ranks, ops: Ops, config: EngineConfig, model: ModelConfig) -> bool:
    """Return whether the tensor ranks have mapped each other's memory. Collective."""
    assert isinstance(ranks, ProcessRanks)
    ranks.peers = join_peers(ranks, ops, config, model.hidden_size, DTYPES[config.data_type])
    return ranks.peers is not None


def _load_prompt_tables(state: DeviceState, directory: Path, reader: WeightReader) -> None:
    section = read_prompt_section(directory, state.model_config)
    state.prompt_limits = prompt_limits(section, state.model_config, state.dtype, directory)
    state.prompts = load_tasks(reader, state.prompt_limits, state.prompt_place())


def _open_adapters(state: DeviceState, directory: Path, weights: Weights) -> AdapterStore | None:
    """Open the folder of adapters, if config.lora_path names one. Collective."""
    config, ranks = state.config, state.ranks
    if config.lora_path == "none" or config.batch_invariant:
        return None
    place = Place(
        weights.specs,
        weights.linears,
        ranks.tensor_rank,
        ranks.tensor_size,
        ranks.num_stages,
        state.dtype,
        state.device,
    )
    world = ranks.tensor_size * ranks.num_stages
    channel = AdapterChannel(ranks.rank, world) if world > 1 else None
    folder = Path(config.lora_path)
    limits = config.max_loras, config.max_lora_rank
    return AdapterStore(folder, directory, place, *limits, channel, state.adapter_tables)
