"""The tests' own tools can fail: each judges a case that is right and one that is wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.reliability import fuzz, load
from tests.reliability.forms import FREE, fault_of
from tests.reliability.report import table
from tests.reliability.traffic import clean, controls, mixture
from tests.reliability.watch import Sample, Watch
from tests.reliability.wire import Outcome, Tensor, grpc_request, http_call, http_request


def outcome(kind: str = "answer", code: str = "", text: str = "", ends: int = 1, **fields) -> Outcome:
    return Outcome(0.0, kind, code, text, ends=ends, end=fields.pop("end", 1.0), **fields)


def test_silence_is_the_longest_gap_after_the_moment_up_to_the_end():
    seen = outcome(progress=[1.0, 2.0, 9.0], end=10.0)
    assert seen.silence_after(0.0) == 7.0
    assert seen.silence_after(3.0) == 6.0
    assert seen.silence_after(9.5) == 0.5


@pytest.mark.parametrize(
    "seen, complaint",
    [
        (outcome(), ""),
        (outcome("error", "UNAVAILABLE", "the engine is down: killed by signal 9"), ""),
        (outcome("error", "UNAVAILABLE", ""), "without a text"),
        (outcome("error", "INTERNAL", "the engine is down"), "code INTERNAL"),
        (outcome("error", "UNAVAILABLE", "Traceback (most recent call last)"), "shows 'Traceback'"),
        (outcome("error", "UNAVAILABLE", "no /tmp/tridecode-0/x"), "shows '/tmp/'"),
        (outcome("hang"), "no end"),
        (outcome(ends=2), "2 ends"),
        (outcome("cancelled", ends=0), ""),
    ],
)
def test_an_end_is_clean_or_told_apart(seen, complaint):
    found = clean(seen, {"UNAVAILABLE"})
    assert complaint in found and bool(complaint) == bool(found)


def watched(health: list[tuple[float, bool]], probes: list[tuple[float, bool]]) -> Watch:
    watch = Watch.__new__(Watch)
    watch.samples = [Sample("health", at - 0.01, at, good, "") for at, good in health]
    watch.samples += [Sample("probe", at - 0.1, at, good, "") for at, good in probes]
    return watch


def test_health_that_stays_true_while_nothing_is_answered_is_a_lie():
    ticks = [at / 10 for at in range(0, 200)]
    probes = [(at, at < 5 or at > 15) for at in ticks]
    seconds, way = watched([(at, True) for at in ticks], probes).disagreement(1.0, 19.0)
    assert 8.5 < seconds < 10.5 and way == "said true"
    honest = [(at, at < 6 or at > 16) for at in ticks]
    assert watched(honest, probes).disagreement(1.0, 19.0)[0] < 1.5
    seconds, way = watched([(at, at < 2) for at in ticks], [(at, True) for at in ticks]).disagreement(
        1.0, 19.0
    )
    assert seconds > 15 and way == "said false"


def test_a_health_that_does_not_answer_counts_as_false():
    ticks = [at / 10 for at in range(0, 100)]
    health = [(at, True) for at in ticks if at < 3]
    seconds, way = watched(health, [(at, True) for at in ticks]).disagreement(1.0, 9.0)
    assert seconds > 4 and way == "said false"


def test_a_slope_ignores_outliers_and_sees_growth():
    times = [float(at) for at in range(100)]
    assert load.theil_sen(times, [5.0 + (50.0 if at == 40 else 0.0) for at in range(100)]) == 0.0
    assert load.theil_sen(times, [5.0 + 0.5 * at for at in range(100)]) == pytest.approx(0.5)


def test_a_leak_is_what_exceeds_the_limit_and_the_resolution():
    slope = load.Slope("rank0", 100.0, 101.0, 6000.0, "RSS MiB", limit=1.0, resolution=6.0)
    assert slope.over(20 / 3600)
    assert not load.Slope("rank0", 100.0, 101.0, 600.0, "RSS MiB", 1.0, 6.0).over(20 / 3600)


SCHEMA = fuzz.Schema(
    "tensorrt_llm_bls",
    True,
    True,
    (
        ("text_input", "BYTES", (1,), False),
        ("max_tokens", "INT32", (1,), False),
        ("top_p", "FP32", (1,), True),
    ),
    ("text_output",),
)


def test_the_fuzzer_draws_the_same_request_again_and_others_for_another_seed():
    one, same, other = (fuzz.Drawer([SCHEMA], seed) for seed in (3, 3, 4))
    drawn = [one.draw(index) for index in range(400)]
    assert [(shot.way, shot.payload) for shot in drawn] == [
        (shot.way, shot.payload) for shot in (same.draw(index) for index in range(400))
    ]
    assert any(drawn[index].payload != other.draw(index).payload for index in range(10))
    assert {shot.kind for shot in drawn} == {"tensors", "leaves", "control", "broken http"}
    assert {shot.way for shot in drawn} == {
        "grpc",
        "stream",
        "http",
        "http_binary",
        "generate",
        "generate_stream",
    }
    assert all(payload not in {shot.payload for shot in drawn} for payload in fuzz.LETHAL.values())


@pytest.mark.parametrize(
    "kind, way, seen, clean_",
    [
        ("tensors", "grpc", outcome("error", "INVALID_ARGUMENT", "temperature is nan; wanted …"), True),
        ("tensors", "grpc", outcome("error", "INTERNAL", "the door failed: KeyError"), False),
        ("tensors", "grpc", outcome("error", "INTERNAL", "something else"), False),
        ("tensors", "http", outcome("error", "500", '{"error":"Unable to parse \'shape\'"}'), True),
        ("tensors", "http", outcome("error", "500", '{"error":"OverflowError"}'), False),
        ("tensors", "http", outcome("error", "503", '{"error":"the engine is full; try later"}'), True),
        ("control", "http", outcome("answer"), False),
        ("control", "http", outcome("error", "403", "This API is restricted"), True),
        ("tensors", "http", outcome("error", "CONNECTION", "reset"), False),
    ],
)
def test_a_fuzzed_request_is_judged_by_its_end(kind, way, seen, clean_):
    assert (fuzz.judge(fuzz.Shot(1, kind, way, "m", b""), seen) == "") == clean_


def test_a_mixture_follows_its_seed_and_controls_have_names_of_their_own():
    assert mixture(1, 20) == mixture(1, 20) != mixture(2, 20)
    assert sum(ask.form != FREE for ask in mixture(1, 12)) == 2
    names = [ask.name for ask in controls()]
    assert len(set(names)) == len(names)


def test_an_answer_that_does_not_obey_its_form_is_a_fault():
    assert fault_of(FREE, "x") == "" == fault_of(("regex", "a+"), "aa")
    assert "does not match" in fault_of(("regex", "a+"), "aab")
    schema = "json_schema", '{"type": "array", "items": {"enum": [1]}}'
    assert fault_of(schema, "[1, 1]") == ""
    assert "is not JSON" in fault_of(schema, "[1") and "2 is not one of" in fault_of(schema, "[2]")


def test_bytes_that_no_client_library_would_send_reach_the_wire():
    request = grpc_request("m", [Tensor("x", "UINT8", [1], [2**64 - 1])], request_id=b"\xff")
    assert request.endswith(b"\x1a\x01\xff")


def test_a_server_that_closes_early_is_an_error_and_one_that_is_silent_a_hang():
    async def serve(answer: bytes | None):
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await asyncio.sleep(5)
            else:
                writer.write(answer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        found = await http_call(address, http_request("/x", b"{}"), 0.5)
        server.close()
        return found

    assert asyncio.run(serve(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")).code == "CONNECTION"
    assert asyncio.run(serve(None)).kind == "hang"
    whole = asyncio.run(serve(b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno"))
    assert (whole.kind, whole.code, whole.text) == ("error", "503", "no")
    chunks = b"6\r\ndata: \r\n" + b'13\r\n{"text_output":"a"}\r\n2\r\n\n\n\r\n0\r\n\r\n'
    events = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    )
    streamed = asyncio.run(serve(events))
    assert (streamed.kind, streamed.outputs["text_output"]) == ("answer", b"a")


def test_a_table_lines_up():
    lines = table(["a", "long head"], [["1", "2"], ["a | b", "x"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and "a / b" in lines[3]
