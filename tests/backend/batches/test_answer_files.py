"""The files that a batch writes survive a kill at any byte, and files of others stay as they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import openai.types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.batch.batches import read
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.batches.answer_files import AnswerFile, AnswerFiles
from tridecode.backend.batches.id_set import IdSet
from tridecode.backend.batches.records import LineError, Response, answer_line, error_line

BODY = Response(200, "r", msgspec.Raw(b'{"text":"x"}'))


def test_a_set_of_ids_is_one_of_python_in_a_fifth_of_the_memory() -> None:
    texts = [f"request-{number}" for number in range(100_000)]
    ids = IdSet()
    assert all(ids.add(text) for text in texts[::2])
    assert not any(ids.add(text) for text in texts[::2])
    assert [text for text in texts if text in ids] == texts[::2] and len(ids) == 50_000
    assert sum(len(bucket or b"") for bucket in ids._buckets) == 14 * 50_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text()))
def test_a_set_of_ids_takes_any_text(texts: list[str]) -> None:
    ids, known = IdSet(), set()
    for text in texts:
        assert ids.add(text) == (text not in known)
        known.add(text)
    assert len(ids) == len(known) and all(text in ids for text in known)


def test_a_half_line_is_cut_off_wherever_the_write_ended(tmp_path) -> None:
    path = tmp_path / "out"
    lines = [answer_line(name, BODY) for name in ("first", 'a "quoted"\nid', "ü" * 40)]
    ids, data = ["first", 'a "quoted"\nid', "ü" * 40], b"".join(lines)
    ends = [sum(map(len, lines[:count])) for count in range(4)]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends[1:])
        file = AnswerFile(path)
        assert [record.custom_id for record in file.records()] == ids[:whole]
        assert path.stat().st_size == ends[whole]
        if size % 20 == 0:
            file.append([lines[0]])
            assert path.read_bytes() == data[: ends[whole]] + lines[0]
        file.close()


def test_a_half_line_longer_than_a_read_is_cut_off(tmp_path) -> None:
    path = tmp_path / "out"
    whole = answer_line("first", BODY)
    path.write_bytes(whole + answer_line("second", BODY)[:-1] + b" " * 200_000)
    AnswerFile(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("data", [b"a diary", b"a diary\n", b'{"id": 3}\n', b'{"id":"x"}\n', b"\0" * 40])
def test_a_file_that_no_batch_wrote_stays_as_it_is(tmp_path, data) -> None:
    for names in (("diary", "errors"), ("answers", "diary")):
        (tmp_path / "diary").write_bytes(data)
        with pytest.raises(ConfigError, match="diary was not written by `tridecode batch`"):
            AnswerFiles(tmp_path / names[0], tmp_path / names[1])
        assert [path.name for path in tmp_path.iterdir()] == ["diary"]
        assert (tmp_path / "diary").read_bytes() == data


def test_a_file_that_another_process_writes_is_refused(tmp_path) -> None:
    with AnswerFiles(tmp_path / "out", tmp_path / "errors"):
        for names in (("out", "e2"), ("o2", "errors")):
            with pytest.raises(ConfigError, match="another process writes"):
                AnswerFiles(tmp_path / names[0], tmp_path / names[1])
    assert os.listdir(tmp_path) == ["out"]  # empty files of errors are removed
    AnswerFiles(tmp_path / "out", tmp_path / "errors").close()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch) -> None:
    file = AnswerFile(tmp_path / "out")
    file.append([answer_line("first", BODY)])
    real_write = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if len(data) > 10:
            return real_write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left") as caught:
        file.append([answer_line("second", BODY)])
    assert caught.value.filename == str(tmp_path / "out")
    monkeypatch.undo()
    file.append([answer_line("third", BODY)])
    file.close()
    assert [line["custom_id"] for line in read(tmp_path / "out")] == ["first", "third"]


def test_errors_are_known_by_their_id_or_if_they_were_not_sent_by_their_line(tmp_path) -> None:
    refusal = Response(400, "r", msgspec.Raw(b'{"error":{}}'))
    with AnswerFiles(tmp_path / "out", tmp_path / "errors") as files:
        files.answers.append([answer_line("a", BODY)])
        # the service's code may be one of ours
        sent = LineError(4, "missing_required_parameter", "no", custom_id="b", response=refusal)
        lost = LineError(5, "service_unavailable", "away", custom_id="c")
        local = LineError(6, "duplicate_custom_id", "twice", custom_id="d", param="custom_id")
        nameless = LineError(7, "invalid_json_line", "line 7 is not valid JSON")
        files.errors.append([error_line(error) for error in (sent, lost, local, nameless)])
    with AnswerFiles(tmp_path / "out", tmp_path / "errors") as files:
        assert "a" in files.answered and len(files.answered) == 1
        assert "b" in files.refused and "c" in files.refused and len(files.refused) == 2
        assert files.reported == {6, 7}
    for line in read(Path(tmp_path / "errors")):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert openai.types.BatchError.model_validate(line["error"]).line in (4, 5, 6, 7)
