"""The published figures: every command is valid, jobs run apart, and reports are collected in one file."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench import published
from tridecode.tools.bench.command import app

TOY = "engine --preset toy --device cpu --batches 1,2 --output-tokens 4 --prompt-tokens 5 --repeats 1"


def test_every_job_is_a_command_of_bench() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for arguments in published.JOBS.values():
        name, *options = shlex.split(arguments)
        found = commands[name].make_context(name, options).params
        assert found["repeats"] == 1 and (
            found["prompt_tokens"] == 512 if name == "engine" else found["slots"] == 256
        )


def write_report(home: Path, card: str, results: dict) -> None:
    home.mkdir()
    (home / "run").write_text(json.dumps({"status": 0, "seconds": 1.0, "cards": "0"}))
    environment = {"time": "", "command": "tridecode bench", "commit": "", "gpus": [{"name": card}]}
    (home / "engine.json").write_text(
        json.dumps({"environment": environment, "results": {"tridecode": results}})
    )


#: in a process of its own, as the command: jobs are forked, and a child of a process whose torch has threads
#: may wait for them forever
_RUN = """
import json, sys
from pathlib import Path
from tridecode.tools.bench import published
published.JOBS = json.loads(sys.argv[2])
assert published.run(Path(sys.argv[1]), ["bad", "toy"], 100.0) == ["bad"]
assert published.run(Path(sys.argv[1]), ["hanging"], 0.5) == ["hanging"]
"""


def test_jobs_are_collected_without_those_that_fail_or_hang(tmp_path: Path, monkeypatch) -> None:
    hanging = "engine --preset toy --repeats 1000000 --device cpu"
    jobs = {"toy": TOY, "bad": "engine --preset absent", "hanging": hanging}
    monkeypatch.setattr(published, "JOBS", jobs)
    command = [sys.executable, "-c", _RUN, str(tmp_path), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "bad: " in lines[0] and "status 2" in lines[0] and "status -9" in lines[2]
    report = published.collect(tmp_path, "1234")
    assert list(report["jobs"]) == ["toy"] and report["environment"]["commit"] == "1234"
    found = report["jobs"]["toy"]
    own = json.loads((tmp_path / "toy" / "engine-toy.json").read_text())["results"]["tridecode"]["batches"]
    assert [row["batch"] for row in found["rows"]] == [1, 2] and found["command"] == f"tridecode bench {TOY}"
    for row, given in zip(found["rows"], own):
        assert row == {key: given[key] for key in row} and row["steady_step_ms"] > 0


def test_the_commands_take_a_folder_and_jobs(tmp_path: Path, monkeypatch, capsys) -> None:
    def command(*arguments: str) -> object:
        monkeypatch.setattr("sys.argv", ["published", *arguments])
        with pytest.raises(SystemExit) as ended:
            published.main()
        return ended.value.code

    monkeypatch.setattr("signal.signal", lambda *given: None)
    ran = []
    monkeypatch.setattr(published, "run", lambda *given: ran.append(given) or ["gpt2"])
    assert command("run", str(tmp_path), "--only", "gpt2", "chats", "--job-s", "9") == 1
    assert command("run", str(tmp_path)) == 1
    assert ran == [(tmp_path, ["gpt2", "chats"], 9.0), (tmp_path, list(published.JOBS), 600.0)]
    assert command("run", str(tmp_path), "--only", "gpt3") == 2
    assert "no job gpt3" in capsys.readouterr().err


def test_the_figures_of_a_load_are_collected(tmp_path: Path) -> None:
    load = {"requests": 3, "tokens_per_s": 12.5, "decode_step_ms": None, "all_seconds": [1.0]}
    write_report(tmp_path / "chats", "H200", {"workload": load})
    rows = published.collect(tmp_path, "1234")["jobs"]["chats"]["rows"]
    assert rows == [{"requests": 3, "tokens_per_s": 12.5}]


def test_results_of_two_machines_are_refused(tmp_path: Path) -> None:
    for name, card in (("gpt2", "H100"), ("bloom-560m", "H200")):
        write_report(tmp_path / name, card, {"batches": []})
    with pytest.raises(ConfigError, match="results of 2 machines"):
        published.collect(tmp_path, "1234")
