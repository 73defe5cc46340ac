"""The addresses in --triton."""

from __future__ import annotations

import re
from importlib.util import find_spec

from tridecode.backend.base.errors import ConfigError

MAX_HOSTS = 64
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})", re.ASCII)


def read_hosts(text: str) -> tuple[str, ...]:
    """Return the HOST:PORT of a comma-separated list. Raises ConfigError, also where gRPC is missing."""
    hosts = [part.strip() for part in text.split(",") if part.strip()]
    for host in hosts:
        found = _HOST.fullmatch(host)
        if found is None or not 1 <= int(found[2]) <= 65_535:
            raise ConfigError(f"--triton has {host!r}; wanted HOST:PORT of Triton's gRPC, as in gpu1:8001")
    twice = next((host for host in hosts if hosts.count(host) > 1), "")
    if twice:
        raise ConfigError(f"--triton names {twice} twice; wanted each server once")
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise ConfigError(f"--triton names {len(hosts)} servers; wanted 1 to {MAX_HOSTS}")
    if find_spec("tritonclient") is None or find_spec("grpc") is None:
        raise ConfigError("--triton needs tritonclient with gRPC; wanted: pip install 'tridecode[front]'")
    return tuple(hosts)
