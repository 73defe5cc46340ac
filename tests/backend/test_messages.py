"""Frames from other processes: whatever they hold, decode raises its one error."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest

from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.wire.messages import Hello, SequenceRequest, Submit, ToEngine, decode, encode
from tridecode.backend.wire.structured_output import StructuredOutput, check


@pytest.mark.parametrize("damage", [(b"text", b"t\xffxt"), (b"hello", b"hell\xff")])
def test_a_text_that_is_not_utf_8_is_a_decode_error(damage) -> None:
    frame = encode(Hello("text", 1, 2))
    assert damage[0] in frame
    with pytest.raises(msgspec.DecodeError):
        decode(frame.replace(*damage), ToEngine)


@pytest.mark.parametrize(
    ("output", "error", "part"),
    [
        (
            StructuredOutput("yaml", "a"),
            RequestError,
            "has the kind 'yaml'; wanted one of json_schema",
        ),
        (
            StructuredOutput("regex"),
            RequestError,
            "kind regex and 0 bytes of text; wanted a regular",
        ),
        (StructuredOutput("json", "{}"), RequestError, "kind json and 2 bytes of text; wanted nothing"),
        (StructuredOutput("regex", "\ud800"), RequestError, "a regex that is not valid UTF-8 text"),
        (
            StructuredOutput("regex", 11 * "é"),
            RequestError,
            "a regex of 22 bytes; this model accepts 20 (",
        ),
    ],
)
def test_a_structured_output_out_of_range_is_named(output, error, part) -> None:
    with pytest.raises(error, match=re.escape(part)):
        check(output, 20)


def test_an_engine_without_grammars_refuses_with_its_reason() -> None:
    with pytest.raises(UnsupportedError, match="is regex, and this engine has no tokenizer"):
        check(StructuredOutput("regex", "a"), 20, "this engine has no tokenizer")


def test_a_structured_output_survives_the_wire_and_is_absent_by_default() -> None:
    plain = SequenceRequest(b"\0\0\0\0")
    obeying = msgspec.structs.replace(plain, structured_output=StructuredOutput("choice", '["a", "b"]'))
    submit = Submit(1, [plain, obeying])
    assert decode(encode(submit), ToEngine) == submit
    assert b"structured" not in encode(Submit(1, [plain]))


#: the first messages that a process decodes, in eight threads at once
FIRST_MESSAGES = """
import sys, threading
from tridecode.backend.wire import messages as m

frame = m.encode(m.Submit(1, [m.SequenceRequest(b"", m.SamplingParams())]))
start, found = threading.Barrier(8), []

def decode():
    start.wait()
    found.append(m.decode(frame, m.ToEngine).request)

threads = [threading.Thread(target=decode) for _ in range(8)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [1] * 8, found
"""


def test_threads_may_decode_the_first_messages_of_a_process() -> None:
    """msgspec crashes where two threads make the first decoder of a type, so the test starts a process."""
    done = subprocess.run([sys.executable, "-c", FIRST_MESSAGES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
