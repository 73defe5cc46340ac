"""`tridecode tritonserver`: NVIDIA's command line, with the installed server and safe defaults.

`tritonserver --model-repository models` works as documented by NVIDIA, even with the server of the
nvidia-pytriton wheel, which ships no backend directory. Flags that the command line does not set get safe
values: the server listens on the loopback interface, and the APIs that load models, map shared memory, or set
logging and tracing need a key (docs/design/security.md). Only `tridecode serve` restarts what dies.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tridecode.tools.serve import triton_access, triton_install
from tridecode.tools.serve.checks import check_repository, repositories
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.signals import Signals

POLL_S = 0.1


def with_defaults(arguments: Sequence[str], key: str) -> list[str]:
    """A command line of tritonserver with safe values for the flags that it does not set.

    key: of the control APIs. Metrics listen where HTTP does, unless --metrics-address is given.
    """
    flags = [
        f"--{name}={triton_access.LOOPBACK}"
        for name in ("http-address", "grpc-address")
        if not triton_access.has_flag(arguments, name)
    ]
    if "--disable-auto-complete-config" not in arguments:
        flags.append("--disable-auto-complete-config")  # otherwise the Python of each model starts twice
    return [*flags, *triton_access.restrictions(key, arguments), *arguments]


def run(arguments: Sequence[str]) -> int:
    """Run tritonserver until it ends; its exit code, 128 + N where signal N killed it.

    The first of SIGTERM, SIGINT and SIGHUP is passed on as SIGTERM, the second one kills. Must run in the
    main thread. Raises ConfigError for a repository that is missing or unsafe, and where no tritonserver can
    be started.
    """
    if {"--help", "-h"} & set(arguments) or not repositories(arguments):
        return _run_bare(arguments)
    for path in repositories(arguments):
        check_repository(Path(path))
    key = triton_access.control_key()
    signals = Signals()
    with GuardedServer(with_defaults(arguments, key), secret=key) as server:
        handled = 0
        while server.running():
            if signals.count > handled:
                handled = signals.count
                server.terminate() if handled == 1 else server.kill()
            time.sleep(POLL_S)
        code = server.returncode
    return 1 if code is None else code if code >= 0 else 128 - code


def _run_bare(arguments: Sequence[str]) -> int:
    """Run it unchanged, for --help and for a command line without a repository, which tritonserver
    refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        install = triton_install.prepare(Path(folder))
        return subprocess.call([str(install.binary), *arguments], env=install.environment)
