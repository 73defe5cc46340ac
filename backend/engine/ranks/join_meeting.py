"""Chooses where this rank runs and meets the others: its GPU, its network interface, the store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.rank_gpus import Demand, node_gpus, shown_here
from tridecode.backend.nodes.addresses import interface_towards

#: variables that choose the interface of gloo and NCCL; the user's own values stay
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_gpu(
    config: EngineConfig, rank: int, local_world: int, first_device: int, count: int
) -> int | None:
    """Return the CUDA device of a rank, numbered within CUDA_VISIBLE_DEVICES; None on a CPU.

    local_world: ranks of this node. first_device: the first device of this node's ranks. count: devices
    visible to torch (the supervisor counted device files). Raises ConfigError if a rank has no GPU of its
    own.
    """
    local, shown = rank % local_world, shown_here(count)
    tensor, stages = config.tensor_para_size, config.pipeline_para_size
    demand = Demand(tensor, stages, nodes=tensor * stages // local_world)
    if config.device == "cpu" or (config.devices == "auto" and not count):
        return None
    if not count:
        raise ConfigError(f"parameter devices is {config.devices}; {shown}; wanted GPUs, or devices = auto")
    if config.devices == "auto":
        before = f", {first_device} of them for ranks before these" if first_device else ""
        demand.check(count - first_device, shown + before)
        return first_device + local
    return node_gpus(demand, config.devices, count, shown)[local]


def join(url: str, rank: int, world: int, listen_fd: int | None, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of init_process_group for the ranks' meeting.

    url: file://PATH on one machine, or tcp://HOST:PORT, where rank 0 serves on the listening socket
    `listen_fd`, which its supervisor has bound to node 0's own address. Raises EngineDownError if rank 0 is
    not reached.
    """
    if not url.startswith("tcp://"):
        return {"init_method": url}
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 0
    interface = interface_towards(host)
    if interface:
        for name in INTERFACES:
            os.environ.setdefault(name, interface)
    more: dict[str, Any] = {} if listen_fd is None else {"master_listen_fd": listen_fd}
    try:
        store = dist.TCPStore(
            host, port, world, rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False, **more
        )
    except (dist.DistError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise EngineDownError(f"rank {rank} cannot reach rank 0 at {host} port {port}: {first}") from None
    return {"store": store}


def set_gpu(config: EngineConfig, rank: int, local_world: int, first_device: int) -> None:
    """Make this rank's GPU the current one. Raises ConfigError."""
    count = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    gpu = choose_gpu(config, rank, local_world, first_device, count)
    if gpu is not None:
        torch.cuda.set_device(gpu)
