"""The supervisor's process: `python -m tridecode.backend.supervisor`. launch.ensure starts it."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from tridecode.backend.base import log_format
from tridecode.backend.supervisor import runtime_dir
from tridecode.backend.supervisor.main import Place, Supervisor, default_rank_command
from tridecode.backend.supervisor.processes import ProcessId


def main() -> None:
    parser = argparse.ArgumentParser(prog="tridecode.backend.supervisor", description=__doc__)
    parser.add_argument("--engine-dir", required=True)
    parser.add_argument("--runtime-dir", required=True, type=Path)
    parser.add_argument(
        "--lock-fd", required=True, type=int, help="locked file descriptor of the runtime folder"
    )
    parser.add_argument("--server", required=True, help="PID:START of the tritonserver")
    parser.add_argument("--number", type=int, default=0, help="index of the engine in instance_group")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Triton's threads block signals, and a mask is inherited
    which = f" engine {arguments.number}" if arguments.number else ""
    log_format.configure(f"supervisor{which}", f"%(name)s{which}")
    os.set_inheritable(arguments.lock_fd, False)  # the ranks must not hold the lock
    runtime_dir.sweep(arguments.runtime_dir.parent)
    pid, start = arguments.server.split(":")
    server = ProcessId(int(pid), int(start))
    place = Place(
        arguments.engine_dir,
        arguments.runtime_dir,
        arguments.lock_fd,
        server,
        default_rank_command(),
        arguments.number,
    )
    Supervisor(place).run()


if __name__ == "__main__":
    main()
