"""The device side of a feature that works between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.parts.background import Background
from tridecode.backend.engine.step.step_buffers import StepBuffers
from tridecode.backend.models.weights import Weights

#: opens the unquantised weights of another model of the served shape, in a directory; None: in the served one
OpenWeights = Callable[[Path | None, ModelConfig], AbstractContextManager[Weights]]


class BackgroundRun:
    """Base class.

    Created before the cache of live requests is allocated, it holds all memory that it needs: a slice touches
    neither their cache nor their workspace nor their sampling state.
    """

    buffers: StepBuffers

    def __init__(self, state: DeviceState, open_weights: OpenWeights):
        """Allocate the buffers and load what the feature needs."""
        raise NotImplementedError

    @classmethod
    def check(cls, model: ModelConfig, config: EngineConfig) -> None:
        """Check the files of the feature. Raises ConfigError."""

    def warm_up(self) -> None:
        """Run the largest slice, so that libraries allocate what they need before the live cache takes the
        rest of the memory.
        """

    def begin(self) -> Background:
        """Return the host side, for a serving engine."""
        raise NotImplementedError
