"""Lines of a batch's input: hostile ones are errors with their number, and the others are read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from tests.tools.batch.batches import completion, write
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.batches import lines as lines_module
from tridecode.backend.batches.lines import InputLines, Request, count_lines
from tridecode.backend.batches.records import NOT_SENT, LineError
from tridecode.backend.front.settings import MAX_BODY_BYTES


def read_all(path: Path, priority: int | None = None) -> tuple[list[Request], list[LineError]]:
    lines, requests, errors = InputLines(path), [], []
    lines.priority = priority
    try:
        while True:
            try:
                request = lines.next()
            except LineError as error:
                errors.append(error)
                continue
            if request is None:
                return requests, errors
            requests.append(request)
    finally:
        lines.close()


def with_fields(**fields: object) -> str:
    return json.dumps({**completion("x"), **fields})


@pytest.mark.parametrize(
    ("line", "code", "param", "text"),
    [
        ("not JSON", "invalid_json_line", None, "is not valid JSON"),
        ('{"custom_id": "x"', "invalid_json_line", None, "is not valid JSON"),
        ("[1, 2]", "invalid_json_line", None, "is not a JSON object"),
        ('"x"', "invalid_json_line", None, "is not a JSON object"),
        ('{"custom_id": "a\udcff"}', "invalid_json_line", None, "is not valid JSON"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line", None, "is not valid JSON"),
        ('{"custom_id": ' + "[" * 100_000 + "]" * 100_000 + "}", "invalid_json_line", None, "not valid JSON"),
        (with_fields(custom_id=None), "missing_required_parameter", "custom_id", "null or none"),
        (with_fields(custom_id=""), "missing_required_parameter", "custom_id", '""'),
        (with_fields(custom_id=17), "missing_required_parameter", "custom_id", "17"),
        (with_fields(custom_id="first"), "duplicate_custom_id", "custom_id", '"first"'),
        (with_fields(method="GET"), "invalid_method", "method", '"GET"'),
        (with_fields(url="/v1/responses"), "invalid_url", "url", "/v1/embeddings"),
        (with_fields(url=["/v1/completions"]), "invalid_url", "url", "wanted"),
        (with_fields(url="http://other/v1/completions"), "invalid_url", "url", "wanted"),
        (with_fields(body=[1]), "invalid_body", "body", "no JSON object"),
        (with_fields(body="x" * 1000), "invalid_body", "body", "no JSON object"),
        (json.dumps({"custom_id": "x", "url": "/v1/completions"}), "invalid_body", "body", "no JSON object"),
        (with_fields(body={"stream": True}), "invalid_body", "stream", "wanted stream false"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path, line, code, param, text) -> None:
    path = write(tmp_path / "in.jsonl", [completion("first"), "", line, completion("last")])
    requests, (error,) = read_all(path)
    assert [one.custom_id for one in requests] == ["first", "last"]
    assert [one.line for one in requests] == [1, 4]
    assert (error.fields.line, error.fields.code, error.fields.param) == (3, code, param)
    assert str(error).startswith("line 3 ") and text in str(error) and len(str(error)) < 300
    assert code in NOT_SENT


def test_a_body_is_sent_as_it_is_with_the_priority_that_it_lacks(tmp_path) -> None:
    number = '{"prompt": "x", "temperature": 1.00, "seed": 12345678901234567890123, "priority": 3}'
    bodies = ['{"prompt":  "x",\t"stream":false,"n": 1e0}', number, '{"stream": null}']
    texts = [f'{{"custom_id": "{i}", "url": "/v1/completions", "body": {b}}}' for i, b in enumerate(bodies)]
    path = write(tmp_path / "in.jsonl", texts)
    requests, errors = read_all(path)
    assert [one.body.decode() for one in requests] == bodies and not errors
    first, second, third = (one.body.decode() for one in read_all(path, priority=9)[0])
    assert first == '{"prompt":"x","stream":false,"n":1e0,"priority":9}'
    assert second == number and third == '{"stream":null,"priority":9}'


def test_a_line_beyond_the_limit_is_skipped_in_bounded_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(completion("first")) + "\n" + '{"custom_id": "long", "body": "')
        for _ in range(20):
            file.write("x" * (1 << 20))
        file.write('"}\n' + json.dumps(completion("last")))  # no newline at the end
    tracemalloc.start()
    try:
        requests, (error,) = read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [one.custom_id for one in requests] == ["first", "last"]
    assert error.fields.code == "line_too_long" and error.fields.line == 2
    assert "20,971,554 bytes; the limit is 1,000" in str(error)
    assert peak < 6 << 20
    assert count_lines(path) == 3


def test_a_byte_order_mark_and_carriage_returns_are_taken(tmp_path) -> None:
    path = tmp_path / "in.jsonl"
    line = json.dumps(completion("a")).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n \r\n" + line.replace(b'"a"', b'"b"') + b"\r\n")
    requests, errors = read_all(path)
    assert [one.custom_id for one in requests] == ["a", "b"] and not errors
    (tmp_path / "empty").touch()
    assert read_all(tmp_path / "empty") == ([], []) and count_lines(tmp_path / "empty") == 0


def test_only_files_are_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is not a regular file"):
        InputLines(tmp_path)
    with pytest.raises(FileNotFoundError):
        InputLines(tmp_path / "absent")


def test_a_line_has_room_for_the_largest_body_of_the_service() -> None:
    assert lines_module.MAX_LINE_BYTES >= MAX_BODY_BYTES + 1024


def test_urls_and_priorities_may_be_prescribed(tmp_path: Path) -> None:
    lines = [completion("a", priority=-5), completion("b"), with_fields(url="/v1/embeddings")]
    path = write(tmp_path / "in.jsonl", lines)
    found = InputLines(path, ["/v1/completions"])
    found.priority, found.overrides = 7, True
    try:
        requests = [found.next(), found.next()]
        with pytest.raises(LineError, match="line 3 has the url .*; wanted /v1/completions$"):
            found.next()
    finally:
        found.close()
    assert [json.loads(request.body)["priority"] for request in requests if request is not None] == [7, 7]
