"""The messages between processes: door <-> engine, door <-> supervisor, engine <-> supervisor.

Each is a msgspec struct, encoded as MessagePack with a tag, one message per zmq frame. Nothing here imports
torch. A door has one DEALER socket to rank 0 of the engine (a ROUTER) and one to the supervisor.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tridecode.backend.wire.limits import Limits
from tridecode.backend.wire.prompt_learning import LearnedPrompt
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput

#: Raised when the meaning of any message changes; both ends compare it in Hello / Welcome.
PROTOCOL = 13
MAX_LORA_NAME = 128  # characters


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt and its sampling parameters: a group of params.num_sequences sequences in the events. An id
    of the prompt from vocab_size on is a row of `learned`.
    """

    prompt: bytes  # int32 token ids, little-endian
    params: SamplingParams = SamplingParams()
    lora_name: str = ""  # name of the adapter; "": the base model
    learned: LearnedPrompt | None = None
    structured_output: StructuredOutput | None = None


# ---------------------------------------------------------------- door -> engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a door on a connection, to the engine and to the supervisor."""

    door: str  # unique name of the door process, e.g. "ensemble:4711"
    pid: int
    server_pid: int  # the tritonserver that started the door
    shm_region: str = ""  # name of the stub's shared memory region, unlinked if the server is killed
    protocol: int = PROTOCOL
    guest: bool = False  # the engine does not stay for it alone


class SessionRound(msgspec.Struct, frozen=True, omit_defaults=True):
    """Marks a request as a round of a session: its rows continue stored tokens, and are stored when it
    ends.
    """

    session: int  # unique within the door
    session_len: int  # tokens of the longest row at the end of the last round
    # number of stored tokens of each row that the round continues; []: the session begins
    retained: list[int] = []
    memory_len: int = 0  # number of latest tokens that are attended to; 0: all
    idle_s: float = 60.0  # the session ends after this long without a round
    #: stored tokens of each row, int32, little-endian, for an engine that does not have the session
    history: list[bytes] = []


class BeamStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of a beam search: the beams after it, best first.

    parents: for each beam the index of its parent after the step before; 0 in the first step. tokens: the
    token that the beam adds to its parent, -1 for one that had ended before. log_probs: of these tokens, 0.0
    for -1.
    """

    parents: list[int]
    tokens: list[int]
    log_probs: list[float]


class Perf(msgspec.Struct, frozen=True, array_like=True):
    """Times and cache blocks of one sequence. Times are ns since the Unix epoch; 0: it never came.

    new_blocks: also those of its answer. missed_blocks: those of its prompt that were not in the cache.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    new_blocks: int
    reused_blocks: int
    draft_tokens: int = 0  # verified drafts
    accepted_draft_tokens: int = 0
    missed_blocks: int = 0


class Sent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one sequence that its door has received from an engine that is gone.

    tokens: int32 token ids, little-endian. ended: its last event is among them; it is not computed again.
    context_rows: rows of context logits. perf: the newest one. steps: of a beam search without a pool.
    """

    tokens: bytes = b""
    ended: bool = False
    context_rows: int = 0
    perf: Perf | None = None
    steps: list[BeamStep] = []


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request of one or more sequences; it is accepted or refused as a whole.

    sent: one entry per sequence if an engine that is gone had begun the request: its sequences continue after
    the sent tokens, and a full queue does not refuse it. []: a new request.
    """

    request: int  # unique within the door
    sequences: list[SequenceRequest]
    priority: int = 0  # smaller is sooner
    timeout_s: float = 0.0  # deadline, from arrival; 0: the engine's default
    label: str = ""  # the client's request id, for logs
    session: SessionRound | None = None
    sent: list[Sent] = []


class EndSession(msgspec.Struct, frozen=True, tag="end_session"):
    """Frees the session's tokens and blocks. Its last round has ended or is cancelled."""

    session: int


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


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. Every rebuilt engine has a higher `epoch`; events of another epoch are ignored."""

    epoch: int
    limits: Limits
    protocol: int = PROTOCOL


class TopLogProbs(msgspec.Struct, frozen=True, array_like=True):
    """The most likely tokens of one step, by the model's own logits; natural logarithms."""

    log_prob: float  # log probability of the chosen token
    rank: int  # rank of the chosen token: number of tokens that are at least as likely, itself included
    ids: list[int]  # best first
    log_probs: list[float]


class EventExtra(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Optional outputs besides tokens; None in events of sequences that request none.

    context_logits: (n, V) float32 bytes, of the next n positions of the prompt. generation_logits: (n, V)
    float32 bytes, of the event's n tokens. Both as the model computed them, before temperature and penalties.
    context_log_prob: of the next tokens of the prompt, without its first one. perf: values so far, sent with
    each token.
    """

    context_logits: bytes = b""
    generation_logits: bytes = b""
    context_log_prob: float = 0.0
    perf: Perf | None = None


class Event(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one sequence, or its end, or both.

    Sequences are numbered prompt by prompt: those of the request's first prompt, then those of the second,
    and so on.
    """

    request: int
    sequence: int  # index within the request
    tokens: list[int] = []
    log_probs: list[float] = []
    finish: str = ""  # "", "end_id", "stop_word", "length", "cancelled", "deadline", "error"
    error: str = ""
    code: str = ""  # Triton status code of the error
    #: (hidden,) float32, once: the context embedding, or what SamplingParams.pooling returns
    context_embedding: bytes = b""
    top_log_probs: list[TopLogProbs] = []  # one per token, where SamplingParams.top_log_probs is set
    extra: EventExtra | None = None
    #: steps of a beam search without a pool, which sends no other tokens
    beams: BeamStep | None = None
    queued_s: float = 0.0  # with the first tokens of a prompt: how long it waited for a slot and blocks
    cached_tokens: int = 0  # with the first tokens of a prompt: tokens of it whose blocks were cached


class Events(msgspec.Struct, frozen=True, tag="events"):
    epoch: int
    events: list[Event]


class EngineBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat every `BEAT_S`: of every rank to the supervisor, of rank 0 to every door.

    busy_s: seconds since the running step began; 0 between steps. A rank that beats but stays busy longer
    than step_timeout_s is stuck. waits: the exchange with other ranks, or the GPU synchronisation, in which
    it waits; "" for none. asleep_s: how long its loop has slept without a reason (supervisor.loop_watch), at
    the Python line `asleep_in`. digest: RankDigest.tokens after `digest_steps` steps, if the engine has
    several ranks.
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
    waits: str = ""
    digest_steps: int = 0
    digest: int = 0
    asleep_s: float = 0.0
    asleep_in: str = ""


# ---------------------------------------------------------------- supervisor -> door


class EngineState(msgspec.Struct, frozen=True, tag="state"):
    """The engine's state: sent to a door after Hello, on each change, and every `BEAT_S`.

    phase: "starting", "ready", "down" (a new engine will be started), "failed" (no engine will be started
    until something changes), "stopping" (a door may start another supervisor), "closing" (the server ends,
    and no engine will continue its requests), "lending" (this node runs ranks for node 0, which answers
    requests). detail: the reason, or the progress of a start. draining: whether the server is about to end;
    guests must then take no new requests, and Triton refuses those of doors.
    """

    epoch: int
    phase: str
    detail: str
    endpoint: str  # zmq address of rank 0
    draining: bool = False


# ---------------------------------------------------------------- rank -> supervisor


class RankReady(msgspec.Struct, frozen=True, tag="rank_ready"):
    epoch: int
    rank: int


class RankProgress(msgspec.Struct, frozen=True, tag="rank_progress"):
    """Progress of a starting rank, to diagnose a start that hangs. waits_for: the ranks that it waits for."""

    epoch: int
    rank: int
    what: str
    waits_for: list[int] = []


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """fatal: a restart would fail in the same way (a wrong setting, a missing file).

    cause: "self"; "peer": an exchange with another rank broke, probably because of that rank; "group": the
    error names the ranks.
    """

    epoch: int
    rank: int
    error: str
    fatal: bool
    cause: str = "self"


class RankDigest(msgspec.Struct, frozen=True, tag="rank_digest"):
    """Digests (CRC-32) of what a rank did in its first `steps` steps. After the same steps all ranks have the
    same tokens, and the tensor ranks of one stage the same state; -1: not known.
    """

    epoch: int
    rank: int
    steps: int
    tokens: int
    stage: int = 0
    state: int = -1


# ---------------------------------------------------------------- supervisor -> rank


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Exit now, without draining and without notifying the doors; the supervisor has notified them."""


BEAT_S = 0.25  # heartbeats of ranks and of the supervisor
PING_S = 1.0  # heartbeats of doors
SILENCE_S = 3.0  # a rank that is silent for longer counts as dead

ToEngine = Hello | Submit | Cancel | EndSession | Goodbye | Ping
FromEngine = Welcome | Events | EngineBeat | Unknown
ToSupervisor = Hello | Ping | Goodbye | RankReady | RankProgress | RankFailed | RankDigest | EngineBeat
FromSupervisor = EngineState | Stop | Unknown

_encoder = msgspec.msgpack.Encoder()
#: by id(), because hashes of unions are slow. Made at import: the process crashes if two threads make the
#: first decoder of a type at the same time
_decoders: dict[int, tuple[object, msgspec.msgpack.Decoder]] = {
    id(union): (union, msgspec.msgpack.Decoder(union))
    for union in (ToEngine, FromEngine, ToSupervisor, FromSupervisor)
}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes, expected: object) -> Any:
    """Decode one frame into a member of the union `expected`; msgspec.DecodeError for any other frame.

    The first call with a union of another module is not safe in several threads.
    """
    found = _decoders.get(id(expected))
    if found is None:
        found = _decoders[id(expected)] = expected, msgspec.msgpack.Decoder(expected)
    try:
        return found[1].decode(frame)
    except UnicodeDecodeError as error:  # msgspec does not convert this error
        raise msgspec.DecodeError(f"a text is not UTF-8: {error}") from None
