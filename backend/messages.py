"""The typed values that cross processes: door <-> engine, door <-> supervisor, engine <-> supervisor.

All are msgspec structs, encoded as MessagePack with a tag, one message a zmq frame. Nothing here imports
torch. A door talks to rank 0 of the engine through a DEALER socket (engine: ROUTER), and to the supervisor
through another.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from tridecode.backend.sampling_params import SamplingParams, check, is_greedy  # noqa: F401  # part of Submit

#: Raised when the meaning of any message changes; both ends compare it in Hello / Welcome.
PROTOCOL = 2


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt and how to go on from it."""

    prompt: bytes  # int32 token ids, little-endian
    params: SamplingParams = SamplingParams()


# ---------------------------------------------------------------- door -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a door on a connection, to the engine and to the supervisor."""

    door: str  # unique name of the door process, e.g. "ensemble:4711"
    pid: int
    server_pid: int  # the tritonserver that owns the door
    shm_region: str = ""  # name of the stub's shared memory region, to be unlinked if the server is killed
    protocol: int = PROTOCOL


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request of one or more sequences; it is accepted or refused as a whole."""

    request: int  # unique within the door
    sequences: list[SequenceRequest]
    priority: int = 0  # smaller is sooner
    timeout_s: float = 0.0  # deadline counted from arrival; 0: the engine's default
    label: str = ""  # the client's request id, for logs


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request: int


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The door is leaving on purpose; its open requests are cancelled."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Sent by a door every `PING_S` so that the other side notices a frozen door."""


# ---------------------------------------------------------------- engine or supervisor -> door


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Answer to a message of a door that is not known here: say Hello again.

    The engine has none of the door's earlier requests: it was restarted, or it dropped the door after a
    silence and cancelled them.
    """


# ---------------------------------------------------------------- engine -> door


class Limits(msgspec.Struct, frozen=True):
    """What a door needs to know to check a request before it is sent."""

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
    request_timeout_s: float = 3600.0  # deadline of a request that names none


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. `epoch` grows with every rebuilt engine; events of another epoch are void."""

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
    context_embedding: bytes = b""  # float32 (hidden,), once, with the first event


class Events(msgspec.Struct, frozen=True, tag="events"):
    epoch: int
    events: list[Event]


class EngineBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by every rank to the supervisor, and by rank 0 to every door, each `BEAT_S`.

    busy_s: seconds since the step under way began; 0 between steps. A rank that beats but stays busy beyond
    step_timeout_s is stuck.
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
    """What the supervisor knows of the engine: sent to a door on Hello, on each change, and every `BEAT_S`.

    phase: "starting" (detail says what), "ready", "down" (detail says why; a new one is coming), "failed" (it
    will not come back without a change; detail says why), "stopping".
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
    """What a starting rank is doing, so that a start-up that hangs can be diagnosed."""

    epoch: int
    rank: int
    what: str


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """fatal: a restart would fail again in the same way (a wrong setting, a missing file)."""

    epoch: int
    rank: int
    error: str
    fatal: bool


# ---------------------------------------------------------------- supervisor -> rank


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Drain nothing, end now: open requests get an error."""


BEAT_S = 0.25  # heartbeats of ranks and of the supervisor
PING_S = 1.0  # heartbeats of doors
SILENCE_S = 3.0  # a rank silent for so long is taken for dead

ToEngine = Union[Hello, Submit, Cancel, Goodbye, Ping]
FromEngine = Union[Welcome, Events, EngineBeat, Unknown]
ToSupervisor = Union[Hello, Ping, Goodbye, RankReady, RankProgress, RankFailed, EngineBeat]
FromSupervisor = Union[EngineState, Stop, Unknown]

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes, expected: object) -> Any:
    """Decode one frame into one of the union `expected`; msgspec.DecodeError where it is none of them."""
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(expected)
    return decoder.decode(frame)
