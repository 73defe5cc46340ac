"""Opens a rank's part of the host tier, before its cache is allocated."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import fields
from pathlib import Path

import torch

from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.draft_loading import DRAFT
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.slots import parts_of_slot
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.weights.draft_files import GLIDE, INFO_FILE
from tridecode.backend.weights.manifest import MANIFEST_FILE

log = logging.getLogger("tridecode.engine")

#: settings on which the keys and values of a block depend
_SETTINGS = (
    "tensor_para_size", "pipeline_para_size", "data_type", "int8_mode", "int8_head", "int8_head_inputs",
    "weights", "max_sequence_tokens", "block_tokens", "kv_cache_dtype", "batch_invariant",
)  # fmt: skip


def open_store(state: DeviceState, directory: Path, fd: int | None) -> HostStore | None:
    """Return the store of this rank; None on all ranks if one rank's memory is not available. Collective.

    fd: the memory file that the supervisor owns; None: create one that ends with this process.
    """
    config, ranks = state.config, state.ranks
    region, fault = _open_region(config, fd)
    if not _is_usable(state, fault) or region is None:
        return None
    identity = identity_of(config, state.model_config, directory, ranks.rank, state.device)
    sizes = [
        tensor.nbytes for layer in state.allocate_cache(1, torch.device("meta")) for tensor in layer.tensors
    ]
    _, slot_bytes = parts_of_slot(sizes)
    region.lay_out(identity, slot_bytes, ranks.smallest(region.most_slots(slot_bytes)))
    gpu = getattr(state.ops, "gpu", None)  # of kernels.cuda.Cuda
    library = None if gpu is None else gpu.library
    store = HostStore(region, sizes, state.device, library)
    region.keep(ranks.exchange_bytes(region.keys()))
    return store


def _open_region(config: EngineConfig, fd: int | None) -> tuple[HostRegion | None, str]:
    """Return this rank's memory, or None and the reason why it cannot be used."""
    size = config.host_cache_bytes // (config.tensor_para_size * config.pipeline_para_size)
    try:
        region = HostRegion(create_file(size) if fd is None else fd)
    except OSError as error:
        return None, f"a memory file of {size:,} bytes could not be made or mapped: {error.strerror}"
    on_node = max(round(config.host_cache_bytes / region.size), 1)  # ranks that share this node's memory
    wanted, free = (region.size - region.resident) * on_node, available_memory()
    if wanted > free:
        return None, f"it needs {wanted:,} bytes of host memory; {free:,} are available"
    return region, ""


def _is_usable(state: DeviceState, fault: str) -> bool:
    """Return whether all ranks can use their memory; log once if not. fault: this rank's reason or ""."""
    faults = [text.decode() for text in state.ranks.exchange_bytes(fault.encode())]
    rank = next((number for number, text in enumerate(faults) if text), None)
    if rank is not None and state.ranks.rank == 0:
        log.warning(
            "the host tier is off (host_cache_bytes in config.pbtxt): %s (rank %d)", faults[rank], rank
        )
    return rank is None


def identity_of(
    config: EngineConfig, model: ModelConfig, directory: Path, rank: int, device: torch.device
) -> bytes:
    """Return 32 bytes that change with anything on which the contents of blocks depend, besides their ids."""
    facts = [f"{row.name}={getattr(model, row.name)}" for row in fields(model)]
    facts += [f"{name}={getattr(config, name)}" for name in _SETTINGS]
    facts += [f"rank={rank}", f"torch={torch.__version__}", f"device={device.type}"]
    folders = [directory] if config.weights == "files" else []
    if config.drafter in (DRAFT, GLIDE):  # the blocks include layers for the drafter's keys and values
        folders.append(Path(config.draft_path))
        facts.append(config.drafter)
    for folder in folders:
        facts += [_stamp(file) for file in sorted(folder.glob("*")) if file.is_file()]
        for file in (folder / name for name in (MANIFEST_FILE, INFO_FILE)):  # they have digests of the rest
            facts.append(hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "")
    return hashlib.sha256("\n".join(facts).encode()).digest()


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"
