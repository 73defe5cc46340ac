"""Decorates methods that wait for other ranks: records the wait, and reports a lost peer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from tridecode.backend.engine.ranks.agreement import PeerLost

#: errors of this rank's own device; older versions of torch have no AcceleratorError
_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

_Method = TypeVar("_Method", bound=Callable[..., Any])


def exchange(what: str) -> Callable[[_Method], _Method]:
    """Decorate a method that waits for other ranks.

    what: a description for diagnoses; "": the method may wait for long. During the call self.waits is `what`.
    An error of torch.distributed becomes PeerLost, because another rank probably caused it. Device errors are
    raised unchanged.
    """

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def run(self: Any, *arguments: Any, **named: Any) -> Any:
            if what:
                self.waits = what
            try:
                return method(self, *arguments, **named)
            except _DEVICE_ERRORS:
                raise
            except RuntimeError as error:
                if str(error).startswith("CUDA"):
                    raise
                raise PeerLost(f"{what or 'the broadcast of a plan'} broke: {_short(error)}") from error
            finally:
                if what:
                    self.waits = ""

        return cast(_Method, run)

    return wrap


@contextmanager
def waiting(ranks: Any, what: str) -> Iterator[None]:
    """Set ranks.waits to `what` within the block, as `exchange` does."""
    ranks.waits = what
    try:
        yield
    finally:
        ranks.waits = ""


def _short(error: BaseException) -> str:
    """Return the first sentence of a gloo or NCCL error, without its source location."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).split("\n")[0])
    return text.split(". This is typically")[0].strip()
