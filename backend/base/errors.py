"""Errors whose text is written for an operator or a client.

Each carries the Triton status code that a client sees. The text says what was found, what was wanted, and
where.
"""

from __future__ import annotations


class TridecodeError(Exception):
    """Root of our errors; `code` is a name of triton_python_backend_utils.TritonError."""

    code = "INTERNAL"


class ConfigError(TridecodeError):
    """config.ini, config.pbtxt or a setting is wrong: names the file, the key, what was found, what was
    wanted.
    """

    code = "INVALID_ARG"


class WeightFileError(TridecodeError):
    """A weight file is missing, has another length than its shape needs, or fails its checksum."""


class CheckpointError(TridecodeError):
    """A source checkpoint has tensors or settings that no rule understands, or lacks some."""


class RequestError(TridecodeError):
    """The request itself is wrong; the same request will never succeed."""

    code = "INVALID_ARG"


class ContextLengthError(RequestError):
    """Prompt and answer together have more tokens than a sequence of the model can have."""


class UnsupportedError(TridecodeError):
    """A known field or feature that this version does not implement was used."""

    code = "UNSUPPORTED"


class CapacityError(TridecodeError):
    """The server is full or out of memory; the same request may succeed later."""

    code = "UNAVAILABLE"


class EngineDownError(TridecodeError):
    """The engine died or hung while it held the request; it is being rebuilt."""

    code = "UNAVAILABLE"


class SessionGoneError(TridecodeError):
    """The session that a request continues no longer exists; the client must start it again."""

    code = "NOT_FOUND"


class RequestCancelled(TridecodeError):
    """The client cancelled, disconnected, or sent a stop request."""

    code = "CANCELLED"


class DeadlineError(TridecodeError):
    """The request's own deadline passed."""

    code = "CANCELLED"


#: code name -> class of the error that a door raises for an engine's answer
BY_CODE: dict[str, type[TridecodeError]] = {
    "INVALID_ARG": RequestError,
    "UNSUPPORTED": UnsupportedError,
    "UNAVAILABLE": CapacityError,
    "CANCELLED": RequestCancelled,
    "NOT_FOUND": SessionGoneError,
    "INTERNAL": TridecodeError,
}
