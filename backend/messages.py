"""The messages between processes: door <-> engine, door <-> supervisor, engine <-> supervisor.

Each is a msgspec struct, encoded as MessagePack with a tag, one message per zmq frame. Nothing here imports
torch. A door has one DEALER socket to rank 0 of the engine (a ROUTER) and one to the supervisor.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from tridecode.backend.sampling_params import SamplingParams

#: Raised when the meaning of any message changes; both ends compare it in Hello / Welcome.
PROTOCOL = 3


MAX_LORA_NAME = 128  # characters


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt and its sampling parameters."""

    prompt: bytes  # int32 token ids, little-endian
    params: SamplingParams = SamplingParams()
    lora_name: str = ""  # of the adapter; "": the base model


# ---------------------------------------------------------------- door -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a door on a connection, to the engine and to the supervisor."""

    door: str  # unique name of the door process, e.g. "ensemble:4711"
    pid: int
    server_pid: int  # the tritonserver that started the door
    shm_region: str = ""  # name of the stub's shared memory region, unlinked if the server is killed
    protocol: int = PROTOCOL


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request of one or more sequences; it is accepted or refused as a whole."""

    request: int  # unique within the door
    sequences: list[SequenceRequest]
    priority: int = 0  # smaller is sooner
    timeout_s: float = 0.0  # deadline, from arrival; 0: the engine's default
    label: str = ""  # the client's request id, for logs


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request: int


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The door is being unloaded; its open requests are cancelled."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat of a door, every `PING_S`."""


# ---------------------------------------------------------------- engine or supervisor -> door


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Answer to a message of an unknown door, which then sends Hello again.

    The engine has none of the door's earlier requests: it was restarted, or it cancelled them after the door
    had been silent for too long.
    """


# ---------------------------------------------------------------- engine -> door


class Limits(msgspec.Struct, frozen=True):
    """The limits by which a door checks a request before it sends it."""

    vocab_size: int
    max_sequence_tokens: int  # prompt + new tokens
    max_sequences: int
    max_queued_requests: int
    max_bad_word_tokens: int
    max_stop_word_tokens: int
    start_id: int
    end_id: int
    model_name: str
    hidden_size: int = 0
    request_timeout_s: float = 3600.0  # deadline of a request without one


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. Every rebuilt engine has a higher `epoch`; events of another epoch are ignored."""

    epoch: int
    limits: Limits
    protocol: int = PROTOCOL


class Event(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one sequence, or its end, or both."""

    request: int
    sequence: int  # index within the request
    tokens: list[int] = []
    log_probs: list[float] = []
    finish: str = ""  # "", "end_id", "stop_word", "length", "cancelled", "deadline", "error"
    error: str = ""
    code: str = ""  # Triton status code of the error
    context_embedding: bytes = b""  # (hidden,) float32, with the first event only


class Events(msgspec.Struct, frozen=True, tag="events"):
    epoch: int
    events: list[Event]


class EngineBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat every `BEAT_S`: of every rank to the supervisor, of rank 0 to every door.

    busy_s: seconds since the running step began; 0 between steps. A rank that beats but stays busy longer
    than step_timeout_s is stuck.
    """

    epoch: int
    rank: int
    steps: int
    busy_s: float
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    metrics: dict[str, float] = {}  # counters and gauges of backend.metrics, by name


# ---------------------------------------------------------------- supervisor -> door


class EngineState(msgspec.Struct, frozen=True, tag="state"):
    """The engine's state: sent to a door after Hello, on each change, and every `BEAT_S`.

    phase: "starting", "ready", "down" (a new engine will be started), "failed" (none will be started until
    something changes), "stopping". detail: the reason, or the progress of a start.
    """

    epoch: int
    phase: str
    detail: str
    endpoint: str  # zmq address of rank 0


# ---------------------------------------------------------------- rank -> supervisor


class RankReady(msgspec.Struct, frozen=True, tag="rank_ready"):
    epoch: int
    rank: int


class RankProgress(msgspec.Struct, frozen=True, tag="rank_progress"):
    """Progress of a starting rank, to diagnose a start that hangs."""

    epoch: int
    rank: int
    what: str


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """fatal: a restart would fail in the same way (a wrong setting, a missing file)."""

    epoch: int
    rank: int
    error: str
    fatal: bool


# ---------------------------------------------------------------- supervisor -> rank


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Exit now, without draining: open requests get an error."""


BEAT_S = 0.25  # heartbeats of ranks and of the supervisor
PING_S = 1.0  # heartbeats of doors
SILENCE_S = 3.0  # a rank that is silent for longer counts as dead

ToEngine = Union[Hello, Submit, Cancel, Goodbye, Ping]
FromEngine = Union[Welcome, Events, EngineBeat, Unknown]
ToSupervisor = Union[Hello, Ping, Goodbye, RankReady, RankProgress, RankFailed, EngineBeat]
FromSupervisor = Union[EngineState, Stop, Unknown]

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes, expected: object) -> Any:
    """Decode one frame into a member of the union `expected`; msgspec.DecodeError for any other frame."""
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(expected)
    return decoder.decode(frame)
