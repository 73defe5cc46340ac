"""The memory of the host tier: one memory file for each rank of this node, which outlives the ranks.

The supervisor writes the random secret at their beginning; backend/engine/host_tier fills the rest. The files
end with the supervisor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from tridecode.backend.base.memory_file import create_file

_OPTION = "--host-cache-fd"

_log = logging.getLogger("tridecode.supervisor")


class HostCache:
    """The files by rank. They are made when ranks start, and again when their size has changed."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # rank -> file descriptor
        self._size = 0

    def options(self, rank: int, node_ranks: int, total: int) -> list[str]:
        """Return the options of a rank's command that name its file; none without a tier.

        node_ranks: ranks of this node. total: bytes for all of them, host_cache_bytes of config.pbtxt. A file
        that cannot be made is logged, and the ranks then have no tier that outlives them.
        """
        size = total // node_ranks
        if size != self._size:
            self.close()
            self._size = size
        if not size:
            return []
        try:
            fd = self._files.get(rank)
            if fd is None:
                fd = self._files[rank] = create_file(size, f"tridecode-host-cache-{rank}")
        except OSError as error:
            _log.warning("no memory for the host tier of rank %d (%d bytes): %s", rank, size, error)
            return []
        return [_OPTION, str(fd)]

    def close(self) -> None:
        """Forget the files; their memory is free once the ranks have ended, too."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def inherited(command: Sequence[str]) -> tuple[int, ...]:
    """Return the descriptors of memory files that a rank's command names."""
    return tuple(int(value) for option, value in zip(command, command[1:]) if option == _OPTION)
