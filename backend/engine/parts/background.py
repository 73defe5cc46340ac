"""Base class of features that process ended requests between the steps of a rank. No torch.

The device side of such a feature is in device/parts.
"""

from __future__ import annotations

from typing import ClassVar

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.schedule.sequence import Finish, Sequence


class Background:
    """Used by the loop's thread. Work is divided into slices, so that a step waits for at most one slice."""

    #: the setting that is 0 if the feature is off
    switch: ClassVar[str]
    #: the feature, and the memory that it needs, as named by `tridecode doctor`
    name: ClassVar[str]
    memory: ClassVar[str]

    @classmethod
    def resolve(cls, model: ModelConfig, config: EngineConfig, device_type: str) -> EngineConfig:
        """Return `config` with the feature's "auto" settings resolved. Raises ConfigError for settings that
        exclude it."""
        return config

    def offer(self, sequence: Sequence, finish: Finish | None) -> None:
        """Record a sequence that has ended; for a beam search the first one, with finish None."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Return whether a slice is queued."""
        raise NotImplementedError

    def may_run(self, live: bool) -> bool:
        """Return whether a slice may run now. live: requests can step and would wait for it."""
        raise NotImplementedError

    def run(self) -> None:
        """Compute one slice. An error ends its job and is counted."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return values for the heartbeat by name. A label is part of the name, as in `name{label="1"}`."""
        raise NotImplementedError
