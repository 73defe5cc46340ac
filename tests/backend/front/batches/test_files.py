"""/v1/files through OpenAI's client and through hostile ones; the bounds of the store."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.backend.front.batches.clients import data_files, line, upload
from tests.backend.front.fronts import Front, error_of
from tests.fake_engine import FakeSupervisor
from tests.waiting import wait_until
from tridecode.backend.front.batches.files import Upload
from tridecode.backend.front.batches.store import Store

FORM = "multipart/form-data; boundary=x"


def part(name: str, content: bytes = b"{}\n", filename: str | None = None) -> bytes:
    shown = "" if filename is None else f'; filename="{filename}"'
    return f'--x\r\ncontent-disposition: form-data; name="{name}"{shown}\r\n\r\n'.encode() + content + b"\r\n"


GOOD = part("purpose", b"batch") + part("file", filename="a.jsonl") + b"--x--\r\n"


def test_files_are_what_was_uploaded(front: Front, folder: Path) -> None:
    content = random.Random(5).randbytes(3_000_000)
    made = front.openai.files.create(file=("données.jsonl", content), purpose="batch")
    assert made.object == "file" and made.purpose == "batch" and made.status == "processed"
    assert made.bytes == len(content) and made.filename == "données.jsonl" and made.expires_at is None
    assert front.openai.files.retrieve(made.id) == made
    assert front.openai.files.content(made.id).content == content
    listed = front.openai.files.list(purpose="batch")
    assert listed.data[0] == made  # the newest first
    assert front.openai.files.list(purpose="batch", order="asc").data[-1] == made
    before = data_files(folder)
    deleted = front.openai.files.delete(made.id)
    assert deleted.deleted and deleted.id == made.id
    assert data_files(folder) == before - 1
    for call in (front.openai.files.retrieve, front.openai.files.content, front.openai.files.delete):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            call(made.id)


def test_files_are_listed_page_by_page(front: Front) -> None:
    made = [upload(front, [line("a")]) for _ in range(5)]
    listed = [file.id for file in front.openai.files.list(limit=2)]
    assert listed[:5] == made[::-1] and len(listed) == len(set(listed))
    page = front.openai.files.list(limit=2, after=made[3]).data
    assert [file.id for file in page] == [made[2], made[1]]
    for file_id in made:
        front.openai.files.delete(file_id)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc/passwd", "passwd"), ("C:\\\\x\\\\y.jsonl", "y.jsonl"), ("", "file.jsonl"), ("a\tb", "ab")],
)
def test_a_filename_is_shown_and_nothing_else(front: Front, folder: Path, name: str, shown: str) -> None:
    body = part("purpose", b"batch") + part("file", filename=name) + b"--x--\r\n"
    found = front.post("/v1/files", content=body, headers={"content-type": FORM}).json()
    assert found["filename"] == shown
    assert (folder / "files" / f"{found['id']}.data").read_bytes() == b"{}\n"
    front.openai.files.delete(found["id"])


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        (b"", 400, None, "ends too early"),
        (GOOD[:-9], 400, None, "ends too early"),
        (b"harbour", 400, None, "cannot be read"),
        (b"\0" * 100_000, 400, None, "cannot be read"),
        (GOOD + b"x" * 70_000, 400, None, "around the file"),
        (part("purpose", b"batch") + b"--x--\r\n", 400, "file", "no field file"),
        (part("file", filename="a") + b"--x--\r\n", 400, "purpose", "no field purpose"),
        (part("purpose", b"fine-tune") + GOOD, 400, "purpose", "wanted batch"),
        (part("purpose", b"x" * 5000) + GOOD, 400, "purpose", "more than 256 bytes"),
        (part("purpose", b"batch") + GOOD, 400, "purpose", "twice"),
        (part("file", b"text") + b"--x--\r\n", 400, "file", "no filename"),
        (part("purposes", b"batch") + GOOD, 400, "purposes", "similar: purpose"),
        (part("expires_after[anchor]", b"created_at") + GOOD, 400, None, "wanted purpose and file"),
        (b"--x\r\n" + b"a: b\r\n" * 5000 + b"\r\n\r\n--x--", 400, None, "cannot be read"),
        (b"--x\r\n" + b"a" * 70_000, 400, None, "cannot be read"),
    ],
)
def test_wrong_forms_are_refused_and_leave_nothing(
    front: Front, folder: Path, body, status, param, text
) -> None:
    before = sorted((folder / "files").iterdir())
    response = front.post("/v1/files", content=body, headers={"content-type": FORM})
    error = error_of(response)
    assert response.status_code == status and text in error["message"], error
    assert param is None or error["param"] == param
    assert sorted((folder / "files").iterdir()) == before


def test_other_content_types_are_refused(front: Front) -> None:
    for kind in ("application/json", "multipart/form-data", "multipart/mixed; boundary=x", "", "x" * 4000):
        response = front.post("/v1/files", content=GOOD, headers={"content-type": kind})
        assert response.status_code == 415, kind
    long = front.post("/v1/files", content=GOOD, headers={"content-type": f"{FORM}{'y' * 500}"})
    assert long.status_code == 400
    packed = front.post("/v1/files", content=GOOD, headers={"content-type": FORM, "content-encoding": "gzip"})
    assert packed.status_code == 415


def test_random_forms_are_refused_or_kept(front: Front, folder: Path) -> None:
    """Parts of a good form that are cut, doubled, swapped and damaged; in pieces of any size."""
    draw = random.Random(11)
    pieces = [part("purpose", b"batch"), part("file", filename="a"), b"--x--\r\n", b"--x", b"\r\n", b"--x--"]
    for _ in range(150):
        body = bytearray(b"".join(draw.choices(pieces, k=draw.randint(1, 5))))
        for _ in range(draw.randint(0, 3)):
            body[draw.randrange(len(body))] = draw.choice(b'\0\r\n-x:;="a\xff')
        size = draw.randint(1, 40)
        sent = (bytes(body[at : at + size]) for at in range(0, len(body), size))
        response = front.post("/v1/files", content=sent, headers={"content-type": FORM})
        assert response.status_code in (200, 400), (bytes(body), response.text)
        if response.status_code == 200:
            front.openai.files.delete(response.json()["id"])
        else:
            error_of(response)
    assert not list((folder / "files").glob("*.part"))


def test_a_client_that_leaves_leaves_nothing(front: Front, folder: Path) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: 9000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.sendall(head.encode() + part("purpose", b"batch") + part("file", b"y" * 2_000_000, "a")[:-2])
        wait_until(lambda: list((folder / "files").glob("*.part")), 30, "an upload")
    wait_until(lambda: not list((folder / "files").glob("*.part")), 30, "its end")
    assert front.http.get("/health").status_code == 200


def test_a_file_beyond_the_limits_is_refused_before_it_is_read(front: Front) -> None:
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: 999999999999\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", front.port), timeout=30) as client:
        client.sendall(head.encode())
        assert b" 413 " in client.recv(100)


@pytest.mark.parametrize(
    "file_id", ["file-" + "0" * 32, "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "file-%00", "lock", "a" * 5000]
)
def test_ids_are_never_paths(front: Front, file_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        response = front.http.request(method, f"/v1/files/{file_id}{path}")
        assert response.status_code in (404, 405), response.text
        error_of(response)


def test_the_store_is_bounded(supervisor: FakeSupervisor, repo: Path, tmp_path: Path) -> None:
    control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    options = (
        "--batch-dir",
        str(tmp_path / "store"),
        "--batch-dir-bytes",
        "1000000",
        "--batch-max-files",
        "3",
    )
    with Front(repo, tmp_path / "log", *options, "--workers", "2", **control) as small:
        files = small.openai.files
        with pytest.raises(openai.APIStatusError, match="limit is 1,000,000|more than 1,000,000") as caught:
            files.create(file=("big", b"x" * 1_000_001), purpose="batch")
        assert caught.value.status_code == 413
        held = files.create(file=("a", b"x" * 600_000), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete some files"):
            files.create(file=("b", b"x" * 600_000), purpose="batch")
        chunked = (part("purpose", b"batch"), part("file", b"x" * 600_000, "c"), b"--x--\r\n")
        response = small.post("/v1/files", content=iter(chunked), headers={"content-type": FORM})
        assert response.status_code == 413 and error_of(response)["code"] == "storage_full"
        files.delete(held.id)
        stored = tmp_path / "store" / "files"
        wait_until(lambda: not list(stored.glob("*.part")), what="the end of the refused upload")
        # of several at once that together are too large, those that fit are kept
        made: list[bool] = []

        def send() -> None:
            try:
                files.create(file=("d", b"x" * 400_000), purpose="batch")
                made.append(True)
            except openai.APIStatusError:
                made.append(False)

        threads = [threading.Thread(daemon=True, target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(made) == [False] * 4 + [True] * 2
        files.create(file=("e", b"x"), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="has 3 files, which is its limit"):
            files.create(file=("f", b"x"), purpose="batch")


def test_a_disk_that_is_full_at_the_end_of_an_upload_keeps_nothing(store: Store, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    received = Upload(store, 0)
    received.write(b"{}\n")
    monkeypatch.setattr("tridecode.backend.front.batches.files.write_whole", full)
    with pytest.raises(OSError, match="No space"):
        received.finish("a", "batch")
    received.abandon()
    assert not list(store.files.iterdir())


def test_a_disk_that_is_full_at_the_beginning_of_an_upload_keeps_nothing(
    store: Store, monkeypatch: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(OSError, match="No space"):
            Upload(store, 1000)
    assert not list(store.files.iterdir()) and len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_written_is_refused_at_once(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match="--batch-dir .*file/x cannot be written"):
        Front(repo, tmp_path / "log", "--batch-dir", str(tmp_path / "file" / "x"))
