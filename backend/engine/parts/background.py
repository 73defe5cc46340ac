"""The base of features that work on ended requests between the steps of a rank. No torch.

The device side of such a feature is in device/parts.
"""

from __future__ import annotations

from typing import ClassVar

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.schedule.sequence import Finish, Sequence


class Background:
    """Used by the thread of the loop. Its work is cut into slices, so that a step waits for one at most."""

    #: the setting that is 0 where the feature is off
    switch: ClassVar[str]
    #: the feature, and the memory that it takes next to the model, in the words of `tridecode doctor`
    name: ClassVar[str]
    memory: ClassVar[str]

    @classmethod
    def resolve(cls, model: ModelConfig, config: EngineConfig, device_type: str) -> EngineConfig:
        """`config` with the feature's "auto" settings decided. Raises ConfigError for settings that exclude
        it."""
        return config

    def offer(self, sequence: Sequence, finish: Finish | None) -> None:
        """Take note of a sequence that has ended; of a beam search the first one. finish: None: the search is
        over."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Return whether a slice is queued."""
        raise NotImplementedError

    def may_run(self, live: bool) -> bool:
        """Return whether it is time for a slice. live: requests can step, which then wait for it."""
        raise NotImplementedError

    def run(self) -> None:
        """Compute one slice. An error ends the work that it belongs to, and is counted."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Values for the heartbeat, by name. A label is part of the name, as in `name{label="1"}`."""
        raise NotImplementedError
