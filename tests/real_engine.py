"""The real engine on a tiny model in a thread of this process, behind the socket that doors connect to.

It stands where `FakeEngine` stands, when the answers themselves matter: they are those of transformers.
"""

from __future__ import annotations

import tempfile
import threading
import time

import torch

from tests.backend.engine.offline_models import offline_engine
from tridecode.backend.engine.__main__ import door_limits
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m


class RealEngine:
    """Rank 0 over `model`. settings: of EngineConfig, and tokenizer_dir, which grammars need.

    Log probabilities do not depend on the batch.
    """

    def __init__(self, model: torch.nn.Module, **settings):
        self.endpoint = "ipc://" + tempfile.mktemp(prefix="real-engine-", dir="/tmp")
        self.epoch = 1
        offline = offline_engine(model, keep_logits=False, batch_invariant=True, block_tokens=32, **settings)
        self.engine, self.scheduler = offline.engine, offline.scheduler
        self.limits = door_limits(self.engine, self.scheduler.grammars.fault)

    def __enter__(self) -> RealEngine:
        self._status = RankStatus()
        hasher = self.scheduler.prompt_hasher
        self._doors = DoorSocket(self.endpoint, self.epoch, self.limits, self._beat, hasher=hasher)
        self._loop = DecodeLoop(self.engine, self.scheduler, self._doors, self._status)
        self._thread = threading.Thread(daemon=True, target=self._loop.run, name="engine")
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._loop.stop()
        self._doors.wake()
        self._thread.join(10)
        self._doors.close()
        self.scheduler.grammars.close()
        assert not self._thread.is_alive(), "the engine's loop did not end"

    def _beat(self) -> m.EngineBeat:
        return m.EngineBeat(self.epoch, 0, self._status.steps, 0.0)

    def idle(self, timeout_s: float = 60.0) -> bool:
        """Return whether all requests end within the time."""
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_work and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.scheduler.has_work
