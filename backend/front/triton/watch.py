"""Follows one server: whether its engine serves, the engine's limits, and the model to send requests to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.backend.wire.messages import PROTOCOL, EngineState, Limits, Welcome

HEALTH_MODEL = "tridecode_health"
PARAMS, EVENTS = "sampling_params", "events"
#: a streaming model with these inputs, and the output EVENTS, serves the front's requests
INPUTS = ("input_ids", "input_lengths", "request_output_len", PARAMS, "priority", "lora_name", "resume")
_PROBE_S = 1.0
#: longest wait for the answer to a probe, which needs no queue and no engine step
_ANSWER_S = 3.0
#: a server that answers no probe for this long loses its requests: without power it closes no connection
_SILENT_S = 10.0

_log = logging.getLogger("tridecode.front")


class _Version(msgspec.Struct):
    protocol: int = 0


class SameModel:
    """The model that all servers must serve: the first one's, with a vocabulary of the tokenizer's size."""

    def __init__(self, vocab_size: int = 0, num_tokens: int = 0):
        """vocab_size: of the weights in the repository; 0: there are none. num_tokens: of the tokenizer,
        without those that were added to it."""
        self._vocab_size, self._num_tokens = vocab_size, num_tokens
        self._first: tuple[str, Limits] | None = None

    def check(self, host: str, limits: Limits) -> None:
        """Raises ConfigError."""
        found = f"it serves {limits.model_name or 'a model'} with a vocabulary of {limits.vocab_size:,}"
        if self._vocab_size and limits.vocab_size != self._vocab_size:
            raise ConfigError(f"{found}; wanted {self._vocab_size:,}, that of the repository's config.ini")
        if limits.vocab_size < self._num_tokens:
            wanted = f"wanted {self._num_tokens:,} or more, the ids of the repository's tokenizer"
            raise ConfigError(f"{found}; {wanted}")
        if self._first is None:
            self._first = host, limits
        other, first = self._first
        if (first.model_name, first.vocab_size) != (limits.model_name, limits.vocab_size):
            wanted = f"wanted {first.model_name or 'a model'} with {first.vocab_size:,}, as {other} has it"
            raise ConfigError(f"{found}; {wanted}")


class HostWatch:
    """Probes a server once a second. state: with phase "ready" only if it takes requests now. model: the one
    that takes them; types: Triton's type of each of its inputs. Used in the event loop; `state` and `limits`
    may be read by any thread."""

    def __init__(
        self, host: str, client: InferenceServerClient, same: SameModel, on_silence: Callable[[str], None]
    ):
        """on_silence: called with a text when the server has been silent for too long."""
        self.host = host
        self.state = EngineState(0, "starting", f"{host} has not been probed yet", host)
        self.limits: Limits | None = None
        self.model = ""
        self.types: dict[str, str] = {}
        self._client, self._same, self._on_silence = client, same, on_silence
        self._heard_at = time.monotonic()
        self._probing: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.state.phase == "ready"

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_PROBE_S)

    async def look(self) -> None:
        """Probe the server now; callers at one time share a probe."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        await asyncio.shield(self._probing)

    async def _probe(self) -> None:
        try:
            found = await self._client.infer(HEALTH_MODEL, [], client_timeout=_ANSWER_S)
            self._heard_at = time.monotonic()
            welcome, detail = _read(found)
            self._same.check(self.host, welcome.limits)
            if not (self.ready and self.model):
                self.model, self.types = await self._find_model(found)
        except InferenceServerException as error:
            self._note("down", self._reason(error))
        except TridecodeError as error:
            self._note("down", f"{self.host}: {error}")
        except Exception as error:  # the next probe may succeed
            _log.exception("the probe of %s failed", self.host)
            self._note("down", f"{self.host}: {type(error).__name__}")
        else:
            self.limits = welcome.limits
            self._note("ready", f"{self.host}: {detail}", welcome.epoch)

    def _reason(self, error: InferenceServerException) -> str:
        if error.status() == "StatusCode.DEADLINE_EXCEEDED":
            silent_s = time.monotonic() - self._heard_at
            if silent_s > _SILENT_S:
                self._on_silence(f"{self.host} has been silent for {silent_s:.0f} s")
            return f"{self.host} does not answer"
        self._heard_at = time.monotonic()
        if error.status() == "StatusCode.NOT_FOUND":
            return f"{self.host} has no model {HEALTH_MODEL}; wanted a server of a Tridecode repository"
        return f"{self.host}: {error.message()}"

    async def _find_model(self, health: Any) -> tuple[str, dict[str, str]]:
        """Return the model that serves the front, and its inputs' types. Raises EngineDownError."""
        names, streams = health.as_numpy("MODELS"), health.as_numpy("STREAMS")
        for name, streaming in zip(_texts(names), () if streams is None else streams.reshape(-1).tolist()):
            if not streaming:
                continue
            model = await self._client.get_model_metadata(name, client_timeout=_ANSWER_S)
            types = {tensor.name: tensor.datatype for tensor in model.inputs}
            if types.keys() >= set(INPUTS) and EVENTS in {tensor.name for tensor in model.outputs}:
                return name, types
        raise EngineDownError(
            f"none of its streaming models has the input {PARAMS}; wanted fastertransformer_streaming, or "
            "tensorrt_llm_streaming of --contract tensorrt_llm_tokens, with the config.pbtxt of this "
            "version's build-repo"
        )

    def _note(self, phase: str, detail: str, epoch: int = 0) -> None:
        if phase != self.state.phase:
            (_log.info if phase == "ready" else _log.warning)("%s: %s", phase, detail)
        self.state = EngineState(epoch, phase, detail, self.host)


def _read(found: Any) -> tuple[Welcome, str]:
    """Return the answer to a probe. Raises EngineDownError for that of another version."""
    data = next(iter(_texts(found.as_numpy("ENGINE"))), "")
    try:
        version = msgspec.json.decode(data, type=_Version).protocol
        if version != PROTOCOL:
            raise EngineDownError(f"its version of the messages is {version}, this front's {PROTOCOL}")
        welcome = msgspec.json.decode(data, type=Welcome)
    except msgspec.MsgspecError:
        wanted = (
            f"wanted {HEALTH_MODEL} with the output ENGINE and the config.pbtxt of this version's build-repo"
        )
        raise EngineDownError(f"it does not report its engine; {wanted}") from None
    return welcome, next(iter(_texts(found.as_numpy("DETAIL"))), "")


def _texts(array: np.ndarray | None) -> list[str]:
    if array is None:
        return []
    return [bytes(item).decode("utf-8", "replace") for item in array.reshape(-1).tolist()]
