"""`tridecode batch` against the OpenAI service before a fake engine."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import httpx
import openai.types
import pytest
from openai.types.chat import ChatCompletion

from tests.backend.front.fronts import Front
from tests.fake_engine import REASON, FakeEngine, FakeSupervisor
from tests.tools.batch.batches import completion, read, request, run, start, write
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes

CHAT = [{"role": "user", "content": "When does the ferry leave?"}]


def ids_of(path: Path) -> list[str]:
    return sorted(line["custom_id"] for line in read(path)) if path.exists() else []


def test_answers_are_those_of_the_service_itself(front: Front, engine: FakeEngine, tmp_path: Path) -> None:
    bodies = {
        "/v1/completions": {"prompt": "the ferry", "max_tokens": 5, "seed": 3, "n": 2, "logprobs": 1},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6, "temperature": 0, "priority": 5},
        "/v1/embeddings": {"input": ["the ferry", "leaves"]},
    }
    kinds = {
        "/v1/completions": openai.types.Completion,
        "/v1/chat/completions": ChatCompletion,
        "/v1/embeddings": openai.types.CreateEmbeddingResponse,
    }
    source = write(tmp_path / "in.jsonl", [request(url, url, body) for url, body in bodies.items()])
    first = len(engine.submits)
    done = run(source, tmp_path / "out.jsonl", "--url", f"{front.url}/v1")
    assert done.exit_code == 0, done.output
    sent = {submit.priority for submit in engine.submits[first:]}
    assert sent == {2**31 - 1, 5}  # lines give way to other requests, unless they say otherwise
    lines = {line["custom_id"]: line for line in read(tmp_path / "out.jsonl")}
    assert set(lines) == set(bodies)
    for url, line in lines.items():
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"]
        kinds[url].model_validate(line["response"]["body"], strict=True)
        direct, found = front.post(url, bodies[url]).json(), line["response"]["body"]
        for changing in ("id", "created"):
            direct.pop(changing, None)
            found.pop(changing, None)
        assert found == direct
    assert len({line["id"] for line in lines.values()}) == 3
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert "3 lines: 3 answers, no errors, 16 tokens in" in done.stderr and not done.stdout
    assert f"{front.url}: 80 requests at a time" in done.stderr  # 64 sequences, and 16 that wait


def test_lines_without_an_answer_are_in_the_file_of_errors(front: Front, tmp_path: Path) -> None:
    lines = [
        completion("good"),
        "not JSON",
        {**completion("x"), "custom_id": None},
        completion("good", max_tokens=2),
        request("route", "/v1/moderations", {}),
        completion("field", best=3),
        completion("model", model="gpt-4o"),
        request("long", "/v1/completions", {"prompt": "x " * 5000}),
        completion("last"),
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = run(source, out, "--url", front.url, "--errors", tmp_path / "bad.jsonl")
    assert done.exit_code == 1, done.output
    assert ids_of(out) == ["good", "last"]
    errors = {line["error"]["line"]: line for line in read(tmp_path / "bad.jsonl")}
    codes = {number: line["error"]["code"] for number, line in errors.items()}
    assert codes == {
        2: "invalid_json_line",
        3: "missing_required_parameter",
        4: "duplicate_custom_id",
        5: "invalid_url",
        6: codes[6],
        7: "model_not_found",
        8: "context_length_exceeded",
    }
    for number in (6, 7, 8):
        response = errors[number]["response"]
        assert response["status_code"] in (400, 404)
        assert response["body"]["error"]["message"] == errors[number]["error"]["message"]
        direct = front.post(lines[number - 1]["url"], lines[number - 1]["body"])
        assert (direct.status_code, direct.json()) == (response["status_code"], response["body"])
    assert errors[6]["custom_id"] == "field" and errors[6]["error"]["param"] == "best"
    assert "9 lines: 2 answers, 7 errors in" in done.stderr
    # nothing is sent or reported a second time; a corrected line is sent
    before = (out.read_bytes(), (tmp_path / "bad.jsonl").read_bytes())
    again = run(source, out, "--url", front.url, "--errors", tmp_path / "bad.jsonl")
    assert again.exit_code == 1 and "9 of them done before" in again.stderr
    assert (out.read_bytes(), (tmp_path / "bad.jsonl").read_bytes()) == before
    write(source, [lines[0], completion("mended"), *lines[2:]])
    run(source, out, "--url", front.url, "--errors", tmp_path / "bad.jsonl")
    assert ids_of(out) == ["good", "last", "mended"]
    assert len(read(tmp_path / "bad.jsonl")) == 7
    # and without the file of errors the lines in it are sent again
    (tmp_path / "bad.jsonl").unlink()
    run(source, out, "--url", front.url, "--errors", tmp_path / "bad.jsonl")
    assert len(read(tmp_path / "bad.jsonl")) == 6 and ids_of(out) == ["good", "last", "mended"]


def test_no_line_is_lost_or_doubled_by_kills(front: Front, tmp_path: Path) -> None:
    count, chance = 240, random.Random(3)
    names = [f"line-{number:03d}" for number in range(count)]
    lines = [completion(name, **({"best": 1} if i % 20 == 7 else {})) for i, name in enumerate(names)]
    source, out, bad = write(tmp_path / "in.jsonl", lines), tmp_path / "out", tmp_path / "out.errors.jsonl"
    arguments, log = (source, out, "--url", front.url, "--concurrency", 3), tmp_path / "log"
    killed = 0
    for wanted in (1, 60, 120, 180):
        child = start(*arguments, log=log)
        try:
            wait_until(
                lambda: child.poll() is not None or _lines(out) >= wanted,  # noqa: B023
                60,
                f"{wanted} answers",
            )
            time.sleep(chance.uniform(0, 0.02))
            child.send_signal(signal.SIGKILL)
            killed += child.wait(30) == -signal.SIGKILL
        finally:
            child.kill()
            child.wait()
        with out.open("ab") as file:  # the kernel finishes a write; a power cut does not
            file.write(b'{"id":"batch_req_'[: chance.randrange(1, 17)])
    assert killed >= 2 and _lines(out) < count, log.read_text()  # some were killed in the middle
    assert run(*arguments).exit_code == 1  # the 12 lines with an unknown field
    answered, refused = ids_of(out), ids_of(bad)
    assert refused == [name for i, name in enumerate(names) if i % 20 == 7]
    assert answered == [name for i, name in enumerate(names) if i % 20 != 7]
    for line in read(out):
        assert line["response"]["body"]["choices"][0]["text"].startswith(line["custom_id"])


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_that_the_next_one_continues(front: Front, tmp_path, signum, code) -> None:
    names = [f"line-{number:03d}" for number in range(100)]
    source = write(tmp_path / "in.jsonl", [completion(name, max_tokens=40) for name in names])
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = (source, out, "--url", front.url, "--concurrency", 2)
    child = start(*arguments, log=log, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        wait_until(lambda: child.poll() is not None or _lines(out) >= 3, 60, "three answers")
        child.send_signal(signum)
        assert child.wait(30) == code, log.read_text()
    finally:
        child.kill()
        child.wait()
    assert 3 <= len(read(out)) < 100
    assert "run the same command again to continue" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert run(*arguments, "--concurrency", 50).exit_code == 0
    assert ids_of(out) == names


def test_a_rebuilt_engine_answers_the_rest(batch_repository: Path, tmp_path: Path) -> None:
    names = [f"line-{number:03d}" for number in range(60)]
    source, out = write(tmp_path / "in.jsonl", [completion(name) for name in names]), tmp_path / "out"
    with FakeEngine(step_s=0.02) as engine, FakeSupervisor(engine) as supervisor:
        options = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with Front(batch_repository, tmp_path / "front.log", **options) as front:
            child = start(source, out, "--url", front.url, "--concurrency", 4, log=tmp_path / "log")
            try:
                wait_until(lambda: _lines(out) >= 4, 60, "four answers")
                engine.stop()
                supervisor.set_phase("down", REASON)
                time.sleep(1.0)
                shape = {"limits": engine.limits, "next_token": engine.next_token}
                with FakeEngine(epoch=engine.epoch + 1, **shape) as following:
                    supervisor.set_ready(following)
                    assert child.wait(60) == 0, (tmp_path / "log").read_text()
            finally:
                child.kill()
                child.wait()
    assert ids_of(out) == names and not (tmp_path / "out.errors.jsonl").exists()


def test_a_service_of_its_own_ends_with_the_command(
    batch_repository: Path, supervisor: FakeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIDECODE_CONTROL_ENDPOINT", supervisor.endpoint)
    names = [f"line-{number:03d}" for number in range(200)]
    lines = [completion(name, model="gpt-4o") for name in names]
    source, out, log = write(tmp_path / "in.jsonl", lines), tmp_path / "out", tmp_path / "log"
    options = ("--model", batch_repository, "--served-model-name", "gpt-4o")
    child = start(source, out, *options, "--concurrency", 2, log=log)
    try:
        wait_until(lambda: child.poll() is not None or _lines(out) >= 3, 60, "three answers")
        fronts = [processes.identify(pid) for pid in processes.children(child.pid)]
        assert len(fronts) == 1 and fronts[0] is not None, log.read_text()
        port = next(word for word in log.read_text().split() if "127.0.0.1" in word).rstrip(":")
        assert httpx.get(f"{port}/v1/models").status_code == 401  # only the command knows the key
        child.kill()
        child.wait(30)
        wait_until(lambda: not processes.alive(fronts[0]), 30, "the end of the front")
    finally:
        child.kill()
        child.wait()
    done = run(source, out, *options)
    assert done.exit_code == 0, done.output
    assert ids_of(out) == names


def test_expected_mistakes_are_one_line(front: Front, batch_repository: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out"
    (tmp_path / "diary").write_text("a diary\n")
    (tmp_path / "empty").mkdir()
    for arguments, text in (
        ((source, out), "neither --url nor --model"),
        ((source, out, "--url", front.url, "--model", "m"), "both --url and --model"),
        ((source, out, "--url", "localhost:9000"), "wanted an address such as http://localhost:9000"),
        ((source, out, "--url", "http://127.0.0.1:9"), "no service answers at http://127.0.0.1:9"),
        ((source, out, "--url", front.url, "--quantize", "int8"), "--quantize with --url"),
        ((source, source, "--url", front.url), "IN and OUT are both"),
        ((source, out, "--url", front.url, "--errors", out), "OUT and --errors are both"),
        ((source, tmp_path / "diary", "--url", front.url), "line 1 of"),
        ((tmp_path / "absent", out, "--url", front.url), "absent: No such file"),
        ((tmp_path, out, "--url", front.url), "is not a regular file"),
        ((source, tmp_path / "absent" / "out", "--url", front.url), "No such file"),
        ((source, out, "--model", tmp_path / "empty"), "has no fastertransformer/config.pbtxt"),
        ((source, out, "--model", "/absent"), "/absent"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and text in errors[0], (arguments, done.output)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["diary", "empty", "in.jsonl"], arguments


def test_a_missing_key_ends_the_command_at_once(
    batch_repository: Path, supervisor: FakeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out"
    control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    with Front(batch_repository, tmp_path / "front.log", "--api-key", "secret", **control) as front:
        done = run(source, out, "--url", front.url)
        assert done.exit_code == 2 and "wanted --api-key or TRIDECODE_API_KEY" in done.stderr
        assert not out.exists()
        monkeypatch.setenv("TRIDECODE_API_KEY", "secret")
        assert run(source, out, "--url", front.url).exit_code == 0
    assert ids_of(out) == ["a"]
