"""The process on whose life an engine depends, as named by its front end."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """The engine's supervisor ends the engine when this process ends.

    pid: that of a server, or of the front end itself. shared_memory: name of a shared memory region that the
    supervisor unlinks if the process is killed; "": none. guest: the engine does not stay for this front end
    alone.
    """

    pid: int
    shared_memory: str = ""
    guest: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        return cls(os.getpid())

    def is_gone(self) -> bool:
        """Return whether the process has ended without ending this one, which must then exit.

        Called four times a second. False for a front end that is its own owner.
        """
        return False
