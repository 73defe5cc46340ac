"""/v1/batches through OpenAI's client: answers, errors, cancellation, expiry, lists and wrong requests."""

from __future__ import annotations

import json
import re

import openai
import openai.types
import pytest
from openai.types.chat import ChatCompletion

from tests.backend.front.batches.clients import create, ids_of, line, results, upload, wait
from tests.backend.front.fronts import Front, error_of
from tests.fake_engine import FakeEngine
from tests.waiting import wait_until

CHAT = [{"role": "user", "content": "When does the ferry leave?"}]
BODIES = {
    "/v1/completions": ({"prompt": "the ferry", "max_tokens": 5, "seed": 3, "n": 2}, openai.types.Completion),
    "/v1/chat/completions": ({"messages": CHAT, "max_tokens": 6, "temperature": 0}, ChatCompletion),
    "/v1/embeddings": ({"input": ["the ferry", "leaves"]}, openai.types.CreateEmbeddingResponse),
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_answers_are_those_of_the_service_itself(front: Front, engine: FakeEngine, endpoint: str) -> None:
    body, kind = BODIES[endpoint]
    first = len(engine.submits)
    sent = {**body, "priority": -7}
    made = create(
        front, [json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": sent})], endpoint
    )
    assert made.status == "validating" and made.endpoint == endpoint and made.metadata == {"of": "a test"}
    assert made.expires_at == made.created_at + 86_400
    done = wait(front, made.id)
    priorities = {submit.priority for submit in engine.submits[first:]}
    assert priorities == {2**31 - 1}  # a line cannot overtake other requests
    assert done.status == "completed" and done.errors is None and done.error_file_id is None
    counts = done.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (1, 1, 0)
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert None not in times and list(times) == sorted(times)  # type: ignore[type-var]
    (found,) = results(front, done.output_file_id)
    assert set(found) == {"id", "custom_id", "response", "error"} and found["error"] is None
    assert found["custom_id"] == "a" and found["response"]["status_code"] == 200
    kind.model_validate(found["response"]["body"], strict=True)
    direct, answer = front.post(endpoint, body).json(), found["response"]["body"]
    for changing in ("id", "created"):
        direct.pop(changing, None)
        answer.pop(changing, None)
    assert answer == direct
    card = front.openai.files.retrieve(done.output_file_id or "")
    assert card.purpose == "batch_output" and card.filename == f"{done.id}_output.jsonl"


def test_hostile_lines_are_errors_and_the_others_are_answered(front: Front) -> None:
    lines = [
        line("good"),
        "not JSON",
        "[" * 100_000,
        '{"custom_id": "nan", "method": "POST", "url": "/v1/completions", "body": {"temperature": NaN}}',
        line("good", max_tokens=2),
        line("route", "/v1/moderations"),
        line("chat", "/v1/chat/completions"),
        line("field", best=3),
        line("stream", stream=True),
        json.dumps({"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}),
        json.dumps(
            {"custom_id": "huge", "method": "POST", "url": "/v1/completions", "body": "x" * (33 << 20)}
        ),
        "",
        "\udcff\udcfe",
        line("last"),
    ]
    done = wait(front, create(front, lines).id)
    assert done.status == "completed"
    assert ids_of(results(front, done.output_file_id)) == ["good", "last"]
    codes = {one["error"]["line"]: one["error"]["code"] for one in results(front, done.error_file_id)}
    assert codes == {
        2: "invalid_json_line",
        3: "invalid_json_line",
        4: "invalid_json_line",
        5: "duplicate_custom_id",
        6: "invalid_url",
        7: "invalid_url",
        8: codes[8],
        9: "invalid_body",
        10: "missing_required_parameter",
        11: "line_too_long",
        13: "invalid_json_line",
    }
    (refused,) = [one for one in results(front, done.error_file_id) if one["error"]["line"] == 8]
    assert refused["custom_id"] == "field" and refused["response"]["status_code"] == 400
    counts = done.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (13, 2, 11)


def test_an_empty_file_fails_as_a_whole(front: Front) -> None:
    file_id = front.openai.files.create(file=("empty.jsonl", b""), purpose="batch").id
    made = front.openai.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    done = wait(front, made.id)
    assert done.status == "failed" and done.failed_at is not None
    assert done.errors is not None and done.errors.data is not None
    assert done.errors.data[0].code == "empty_file"
    assert done.output_file_id is None and done.error_file_id is None


def test_a_cancelled_batch_keeps_its_answers_and_frees_the_engine(front: Front, engine: FakeEngine) -> None:
    lines = [line(f"line-{number:03d}", max_tokens=60) for number in range(2000)]
    made = create(front, lines)
    wait_until(lambda: _completed(front, made.id) >= 5, 120, "five answers")
    with pytest.raises(openai.ConflictError, match="is the input of a batch"):
        front.openai.files.delete(made.input_file_id)
    cancelled = front.openai.batches.cancel(made.id)
    assert cancelled.status in ("cancelling", "cancelled") and cancelled.cancelling_at is not None
    done = wait(front, made.id)
    assert done.status == "cancelled" and done.cancelled_at is not None
    found = results(front, done.output_file_id)
    counts = done.request_counts
    assert counts is not None and counts.completed == len(found) < 2000
    assert len(set(ids_of(found))) == len(found) >= 5
    wait_until(lambda: not engine.running, 30, "an idle engine")
    with pytest.raises(openai.ConflictError, match="is cancelled; wanted one that is not finished"):
        front.openai.batches.cancel(made.id)
    assert front.openai.files.delete(made.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        front.openai.files.retrieve(made.input_file_id)


def _completed(front: Front, batch_id: str) -> int:
    counts = front.openai.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def test_lines_that_are_late_are_errors_of_the_batch(front: Front) -> None:
    count = 3000
    made = create(front, [line(f"line-{n:04d}", max_tokens=60) for n in range(count)], window="2s")
    done = wait(front, made.id)
    assert done.status == "expired" and done.expired_at is not None
    found, late = results(front, done.output_file_id), results(front, done.error_file_id)
    assert {one["error"]["code"] for one in late} == {"batch_expired"}
    assert ids_of(found + late) == [f"line-{n:04d}" for n in range(count)]
    counts = done.request_counts
    assert counts is not None and (counts.total, counts.failed) == (count, len(late))


def test_batches_are_listed_the_newest_first_page_by_page(front: Front) -> None:
    made = [create(front, [line("a")]).id for _ in range(3)]
    for one in made:
        wait(front, one)
    listed = [one.id for one in front.openai.batches.list(limit=2)]  # follows the pages
    assert listed[:3] == made[::-1] and len(set(listed)) == len(listed)
    page = front.openai.batches.list(limit=1, after=made[2])
    assert [one.id for one in page.data] == [made[1]]


def test_wrong_requests_are_refused_by_name(front: Front) -> None:
    file_id = upload(front, [line("a")])
    good = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    outputs = wait(front, front.post("/v1/batches", good).json()["id"])
    for change, param, text in (
        ({"completion_window": "soon"}, "completion_window", "wanted 24h"),
        ({"completion_window": "31d"}, "completion_window", "up to 30d"),
        ({"endpoint": "/v1/images"}, "endpoint", "wanted /v1/chat/completions"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id", "wanted the id of a file"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id", "wanted the id of a file"),
        ({"input_file_id": outputs.output_file_id}, "input_file_id", "wanted batch"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "17 entries"),
        ({"metadata": {"k": "v" * 600}}, "metadata", "600 characters"),
        ({"metadata": {"k": "\ud800"}}, "metadata", "cannot be shown"),
        ({"metadata": {"k": 5}}, None, "metadata"),
        ({"window": "24h"}, "window", "window"),
    ):
        response = front.post("/v1/batches", content=json.dumps({**good, **change}))
        error = error_of(response)
        assert response.status_code == 400 and text in error["message"], (change, error)
        assert param is None or error["param"] == param, (change, error)
    for missing in good:
        response = front.post("/v1/batches", {k: v for k, v in good.items() if k != missing})
        assert response.status_code == 400 and missing in error_of(response)["message"]
    for limit in ("0", "101", "-1", "x", "1" * 30, ""):
        response = front.http.get("/v1/batches", params={"limit": limit})
        assert response.status_code == 400 and error_of(response)["param"] == "limit"
    assert error_of(front.http.get("/v1/batches?after=batch_x"))["param"] == "after"


@pytest.mark.parametrize(
    "batch_id",
    ["batch_" + "0" * 32, "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", ".batch_x", "batch_%00", "a" * 5000],
)
def test_ids_are_never_paths(front: Front, batch_id: str) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel")):
        response = front.http.request(method, f"/v1/batches/{batch_id}{path}")
        assert response.status_code in (404, 405), response.text
        assert re.search("does not exist|does not take", error_of(response)["message"])


def test_a_service_without_a_folder_says_so(supervisor, repo, tmp_path) -> None:
    control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    with Front(repo, tmp_path / "log", **control) as bare:
        for response in (bare.http.get("/v1/files"), bare.post("/v1/batches", {}), bare.post("/v1/files")):
            assert response.status_code == 404 and "--batch-dir" in error_of(response)["message"]
