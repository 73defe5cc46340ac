"""Checks that the ranks of an engine agree: on their settings when they join, on their state while they
serve.

At the join every rank publishes its facts in the store of torch.distributed, before any collective, so that
ranks of different versions still find each other. In service every rank computes a digest of the sampled
tokens and, periodically, of the state that tensor ranks replicate; the supervisor compares them (StepDigest).
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.step.plan import LateSamples, PlanMessage, StepPlan, StepResult
from tridecode.backend.weights.draft_files import TENSORS_FILE
from tridecode.backend.weights.manifest import MANIFEST_FILE
from tridecode.backend.wire.messages import PROTOCOL, RankDigest

#: settings that may differ between nodes: paths, threads, devices, and parameters that the engine does not
#: read
_OWN_SETTINGS = ("num_threads", "lora_path", "draft_path", "verify_weights", "devices", "extra")
_POLL_S = 0.02
#: steps between two digests of the state, on every rank
CHECK_STEPS = 32
#: rows of a step's output that a digest reads
_CHECK_ROWS = 64
_NOTHING = "nothing"  # value of a fact that a rank of another version does not have


class PeerLost(TridecodeError):
    """An exchange with other ranks failed, probably because another rank has ended or is stopped."""


class AgreementError(ConfigError):
    """The ranks differ in a fact that must be equal; the text names the ranks and both values."""


class Store(Protocol):
    """The part of torch.distributed's stores that is used here."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


#: callback (what, ranks): what this rank waits for, and for which ranks, at each change
OnWait = Callable[[str, "list[int]"], None]


# ---------------------------------------------------------------- at the join


def facts_of(
    config: EngineConfig, model: ModelConfig, directory: Path, device: torch.device
) -> dict[str, str]:
    """Return the facts of this rank by name, as text. config: as it was read, before "auto" is resolved."""
    kind = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    facts = {
        "the protocol": str(PROTOCOL),
        "tridecode": _version(),
        "torch": str(torch.__version__),
        "its processor": f"CUDA capability {kind[0]}.{kind[1]}"
        if kind
        else f"CPU {torch.backends.cpu.get_cpu_capability()}",
        "manifest.json": _digest(directory / MANIFEST_FILE),
        "lora_path": "none" if config.lora_path == "none" else "a folder",
        **{
            f"{name} of draft_path": _NOTHING
            if config.draft_path == "none"
            else _digest(Path(config.draft_path) / name)
            for name in (MANIFEST_FILE, TENSORS_FILE)
        },
    }
    for row in fields(config):
        if row.name not in _OWN_SETTINGS:
            facts[f"{row.name} (config.pbtxt)"] = str(getattr(config, row.name))
    for row in fields(model):
        facts[f"{row.name} (config.ini)"] = str(getattr(model, row.name))
    return facts


def _version() -> str:
    try:
        return version("tridecode")
    except PackageNotFoundError:
        return _NOTHING


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return _NOTHING


class Meeting:
    """The store through which the ranks of an epoch meet.

    limit_s: longest wait for the others, in seconds.
    """

    def __init__(self, store: Store, rank: int, world: int, limit_s: float, on_wait: OnWait | None = None):
        self._store, self._rank, self._world, self._limit_s = store, rank, world, limit_s
        self._on_wait = on_wait or (lambda what, ranks: None)
        self._gathered = 0

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare facts with those of all ranks. Raises AgreementError, on every rank with the same text;
        PeerLost if a rank does not join within limit_s.
        """
        found = self._gather("facts", dict(facts), "joining")
        text = disagreement([{str(name): str(value) for name, value in one.items()} for one in found])
        if text:
            self._gather("told", True, "joining")  # a store that rank 0 serves ends with it
            raise AgreementError(text)

    def barrier(self, what: str) -> None:
        """Return once all ranks have reached this call. Raises PeerLost after limit_s."""
        self.gather(what, True)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return every rank's value, which msgspec must be able to encode, by rank.

        All ranks gather in the same order. Raises PeerLost after limit_s.
        """
        self._gathered += 1
        return self._gather(f"{what} {self._gathered}", value, what)

    def _gather(self, key: str, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank."""
        self._store.set(f"{key}/{self._rank}", msgspec.msgpack.encode(value).hex())
        missing, deadline = set(range(self._world)) - {self._rank}, time.monotonic() + self._limit_s
        self._on_wait(what, sorted(missing))
        found = {self._rank: value}
        while missing:
            come = {rank for rank in missing if self._store.check([f"{key}/{rank}"])}
            for rank in come:
                data = bytes.fromhex(self._store.get(f"{key}/{rank}").decode())
                found[rank] = msgspec.msgpack.decode(data)
            missing -= come
            if come:
                self._on_wait(what, sorted(missing))
            elif time.monotonic() > deadline:
                text = (
                    f"rank {self._rank} has waited {self._limit_s:.3g} s, {what}, for {ranks_text(missing)}"
                )
                raise PeerLost(text)
            else:
                time.sleep(_POLL_S)
        return [found[rank] for rank in range(self._world)]


def ranks_text(ranks: Any) -> str:
    """ "rank 2" or "ranks 0, 1"."""
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def disagreement(facts: list[dict[str, str]]) -> str:
    """Describe the first facts that differ: which ranks have which value; "" if all agree. facts: by rank."""
    names = sorted({name for one in facts for name in one}, key=_first_in(facts))
    different = [name for name in names if len({one.get(name, _NOTHING) for one in facts}) > 1]
    if not different:
        return ""
    values = [one.get(different[0], _NOTHING) for one in facts]
    usual = max(Counter(values).items(), key=lambda item: (item[1], item[0] == values[0]))[0]
    odd = next(value for value in values if value != usual)
    others = [rank for rank, value in enumerate(values) if value == odd]
    rest = [rank for rank, value in enumerate(values) if value == usual]
    more = f" (also different: {', '.join(different[1:4])})" if len(different) > 1 else ""
    return (
        f"the ranks disagree: {different[0]} is {odd} on {ranks_text(others)} and {usual} on "
        f"{ranks_text(rest)}; wanted the same on all{more}"
    )


def _first_in(facts: list[dict[str, str]]) -> Callable[[str], int]:
    order = {name: index for one in reversed(facts) for index, name in enumerate(one)}
    return order.__getitem__


# ---------------------------------------------------------------- in service


def seal(frame: bytes) -> bytes:
    """Return the frame of a plan after its CRC-32 of 4 bytes."""
    return zlib.crc32(frame).to_bytes(4, "little") + frame


def unseal(sealed: bytes) -> bytes:
    """The frame. Raises TridecodeError if its bytes are not those that rank 0 sealed."""
    frame, wanted = sealed[4:], int.from_bytes(sealed[:4], "little")
    if zlib.crc32(frame) != wanted:
        found = f"digest {zlib.crc32(frame):08x}, wanted {wanted:08x}"
        raise TridecodeError(f"a plan of {len(frame):,} bytes from rank 0 is damaged: {found}")
    return frame


class PlanOrder:
    """Checks that plans arrive in order, without duplicates or gaps."""

    def __init__(self, rank: int) -> None:
        self._rank, self._last = rank, -1

    def check(self, plan: PlanMessage) -> PlanMessage:
        """Return the message. Raises TridecodeError unless it is the next plan or late samples of the last
        plan. The first plan may have any number.
        """
        if isinstance(plan, LateSamples):
            if plan.step != self._last:
                text = f"rank {self._rank} got late samples of plan {plan.step} after plan {self._last}"
                raise TridecodeError(text)
            return plan
        if self._last >= 0 and plan.step != self._last + 1:
            raise TridecodeError(
                f"rank {self._rank} got plan {plan.step} after plan {self._last}; wanted {self._last + 1}"
            )
        self._last = plan.step
        return plan


class StepDigest:
    """Digests of the work of one of several ranks, for the supervisor. Used by the thread of the loop.

    tokens: of all tokens of the first `steps` steps, the same on all ranks. The state is what the tensor
    ranks of a stage replicate; it is read after every CHECK_STEPS-th step.
    """

    def __init__(self, epoch: int, rank: int, stage: int, status: Any, send: Callable[[RankDigest], None]):
        """status: of the rank, gets (steps, tokens) as its `digest`."""
        self._epoch, self._rank, self._stage = epoch, rank, stage
        self._status, self._send = status, send
        self.steps = self.tokens = 0
        self._states: dict[int, int] = {}  # by plan number, for steps that are not committed

    def launched(self, plan: StepPlan, copies: Callable[[], list[Tensor]]) -> None:
        """Note that a step was launched.

        copies: the tensors that all tensor ranks of this stage replicate.
        """
        if plan.step % CHECK_STEPS == 0:
            state = 0
            for tensor in copies():
                state = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, state)
            self._states[plan.step] = state

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Add the tokens of a step and the results of its parts."""
        data = np.ascontiguousarray(result.tokens, np.int32)
        for part, found in zip(plan.parts, result.parts):
            data = part.digest(data, found)
        self.committed_ids(plan, data)

    def committed_ids(self, plan: StepPlan, data: np.ndarray) -> None:
        """Note that a step is committed. data: int32, the tokens as known to all ranks."""
        self.tokens = zlib.crc32(data.data, self.tokens)
        self.steps += 1
        self._status.digest = self.steps, self.tokens
        if plan.step % CHECK_STEPS == 0:
            state = self._states.pop(plan.step, -1)
            self._send(RankDigest(self._epoch, self._rank, self.steps, self.tokens, self._stage, state))


def copied_state(state: Any, hidden: Tensor, num_tokens: int) -> list[Tensor]:
    """Return the state that all tensor ranks of a stage must hold equally after a step, on the CPU: the slots
    of SamplingState and the first rows of the stage's output.
    """
    return [state.slots, state.last_tokens, hidden[: min(num_tokens, _CHECK_ROWS)]]
