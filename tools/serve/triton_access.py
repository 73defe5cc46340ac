"""Access to Triton's APIs: flags that close the APIs that clients do not need, and the key that opens them
for `tridecode serve`.

Triton compares a header with a value that it takes from its command line only, and other users of the machine
can read a command line. `conceal` therefore overwrites the key there as soon as Triton has read it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from tridecode.backend.base.errors import ConfigError

LOOPBACK = "127.0.0.1"  # default address of all ports
KEY_VARIABLE = "TRIDECODE_CONTROL_KEY"
HEADER = "tridecode-control"  # over gRPC Triton puts "triton-grpc-protocol-" before it
CLOSED = ("model-repository", "shared-memory", "trace", "logging")
_KEY = re.compile(r"[A-Za-z0-9_-]{16,256}")
_FLAGS = ("http-restricted-api", "grpc-restricted-protocol")


def control_key() -> str:
    """The key of $TRIDECODE_CONTROL_KEY, which is removed from our environment; default: a random key.

    Raises ConfigError for a key that is short or has characters at which Triton splits a flag.
    """
    given = os.environ.pop(KEY_VARIABLE, None)
    if given is None:
        return secrets.token_urlsafe(24)
    if not _KEY.fullmatch(given):
        raise ConfigError(
            f"{KEY_VARIABLE} holds {len(given)} characters; wanted 16 to 256 of A-Z, a-z, 0-9, - and _"
        )
    return given


def restrictions(key: str, given: Sequence[str] = ()) -> list[str]:
    """Return flags with which Triton answers calls of CLOSED without the key with 403 or UNAVAILABLE. given:
    the user's arguments of tritonserver; an API that they restrict keeps their key, since Triton accepts one
    restriction per API.
    """
    flags = []
    for name in _FLAGS:
        taken = {
            api for value in values_of(given, name) for api in value.partition(":")[0].split(",") if value
        }
        left = [api for api in CLOSED if api not in taken]
        if left:
            flags.append(f"--{name}={','.join(left)}:{HEADER}={key}")
    return flags


def values_of(arguments: Sequence[str], name: str) -> list[str]:
    """Return the values of the flag --name in a command line, as --name=VALUE or --name VALUE."""
    values = []
    for index, argument in enumerate(arguments):
        if argument.startswith(f"--{name}="):
            values.append(argument.partition("=")[2])
        elif argument == f"--{name}":
            values.append(arguments[index + 1] if index + 1 < len(arguments) else "")
    return values


def has_flag(arguments: Sequence[str], name: str) -> bool:
    return bool(values_of(arguments, name))


def has_read_arguments(pid: int) -> bool:
    """Return whether a tritonserver has parsed its command line: its first thread starts only then."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def conceal(pid: int, secret: str) -> None:
    """Overwrite `secret` in the command line of a child process, which other users can read.

    Raises OSError if the system forbids writing to the memory of a child.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if not 0 < start < end:
        raise PermissionError(f"/proc/{pid}/stat does not tell where the command line is")
    wanted = secret.encode()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        text = memory.read(end - start)
        at = text.find(wanted)
        while at >= 0:
            memory.seek(start + at)
            memory.write(b"*" * len(wanted))
            at = text.find(wanted, at + len(wanted))
