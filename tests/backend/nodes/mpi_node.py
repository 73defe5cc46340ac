"""A node of a job: meets the others over MPI as its supervisor would, and writes the messages that it
receives."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.nodes import launchers
from tridecode.backend.nodes import rendezvous as meeting
from tridecode.backend.supervisor import processes


def main() -> int:
    folder = Path(sys.argv[1])
    place = launchers.find_place(os.environ)
    assert place is not None, "a server of its own"
    server = processes.identify(os.getpid())
    assert server is not None
    try:
        found = meeting.find(place, server, folder)
    except TridecodeError as error:
        told = {"index": place.index, "error": str(error)}
    else:
        told = {"index": place.index, "launcher": place.launcher, "meeting": msgspec.to_builtins(found)}
    (folder / f"told{place.index}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
