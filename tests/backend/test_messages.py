"""Frames from other processes: whatever they hold, decode raises its one error."""

from __future__ import annotations

import msgspec
import pytest

from tridecode.backend.wire.messages import Hello, ToEngine, decode, encode


@pytest.mark.parametrize("damage", [(b"text", b"t\xffxt"), (b"hello", b"hell\xff")])
def test_a_text_that_is_not_utf_8_is_a_decode_error(damage) -> None:
    frame = encode(Hello("text", 1, 2))
    assert damage[0] in frame
    with pytest.raises(msgspec.DecodeError):
        decode(frame.replace(*damage), ToEngine)
