"""`make clients`: public programs, unmodified, against the real server; the table of docs/guides/clients.md.

Each program has a virtual environment of its own and a time limit, and talks to the loopback interface only.
It runs against the repository that `tridecode build-repo` makes without options; where it fails there and an
option exists for it, against a repository of that option too. A program that cannot be installed is a row
that says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from tests.clients import environments, table
from tests.clients.environments import Installed
from tests.clients.judge import PROMPT_FIRST, Expected, Verdict, judge, shorten
from tests.clients.openai_service import chat_prompt, lambada_accuracy, tools_service, wait_ready
from tests.clients.program import BLS, Program
from tests.clients.programs import PROGRAMS
from tests.clients.replay import recorded, refusal
from tests.integration.clients import post
from tridecode.tools.build_repo.checkpoint_digest import checkpoint_digest, converter_digest
from tridecode.tools.demo import packaged_model
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.server_process import ServerProcess, running_server

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent
CACHE = ROOT / ".clients"
PROMPT, TOKENS = "The capital of France is", 16
EXCLUDE = ("--exclude-input",)
BUILD_S = 600.0
NOWHERE = "http://127.0.0.1:9"  # a proxy that does not exist: only loopback can be reached


@dataclass(frozen=True)
class Setting:
    """State shared by all programs of a run."""

    cache: Path
    sources: Path
    model: str
    refresh: bool = False
    lambada: Path = CLIENTS / "data" / "lambada_test.jsonl"


@dataclass(frozen=True)
class Attempt:
    program: Program
    version: str
    verdict: Verdict
    replayed: bool = False


# ---------------------------------------------------------------- one program


class Runner:
    """Runs programs against one server, which has an OpenAI service at openai_port."""

    def __init__(
        self, setting: Setting, repository: Path, server: ServerProcess, openai_port: int, expected: Expected
    ) -> None:
        self._setting = setting
        self._repository = repository
        self._server = server
        self._front = f"127.0.0.1:{openai_port}"
        self._expected = expected
        self._running = ExitStack()
        self._tools = self._lambada = self._served_name = ""
        self._requests = recorded()
        self._installed: dict[str, Installed] = {}

    def close(self) -> None:
        """Stop the processes that run with the server."""
        self._running.close()

    def attempt(self, program: Program) -> Attempt:
        source = self._source(program)
        if program.command and (not program.source or source):
            return self._run(program, source)
        return self._replay(program)

    def _source(self, program: Program) -> Path | None:
        file = self._setting.sources / program.source
        return file if program.source and file.is_file() else None

    def _checkout(self, program: Program) -> Path:
        return self._setting.sources / program.source.partition("/")[0]

    def _replay(self, program: Program) -> Attempt:
        """Send its recorded requests; the first that is refused decides."""
        for key in program.recorded:
            refused = refusal(self._server.grpc_url, self._requests[key])
            if refused:
                return Attempt(program, "", Verdict(False, shorten(refused)), replayed=True)
        return Attempt(program, "", Verdict(True), replayed=True)

    def _run(self, program: Program, source: Path | None) -> Attempt:
        installed, version, failure = Installed(), "", ""
        if program.environment:
            installed = self._install(program.environment)
            version, failure = installed.version, installed.failure
        if source:
            version = _commit(self._checkout(program))
        perf, missing = environments.perf_analyzer(self._setting.cache)
        if "{perf_analyzer}" in program.command or program.environment == "genai-perf":
            failure = failure or missing
        if "{perf_analyzer}" in program.command:
            version = environments.PERF_ANALYZER.partition("==")[2]
        if failure:
            if program.recorded:
                return replace(self._replay(program), version=f"not installed: {shorten(failure)}")
            return Attempt(program, "", Verdict(False, f"cannot be installed: {shorten(failure)}"))
        if program.environment == "":
            version = _own_version(program.command[0])
        work = self._setting.cache / "work" / hashlib.sha256(repr(program).encode()).hexdigest()[:12]
        work.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare(program, work)
        except RuntimeError as error:
            return Attempt(program, version, Verdict(False, shorten(str(error))))
        command = [self._fill(word, program, installed, source, work, perf) for word in program.command]
        paths = _import_paths(source, self._checkout(program)) if source else []
        env = _environment(installed, paths, work, perf)
        status, output = _bounded(command, work, env, program.limit_s)
        (work / "output.txt").write_text(" ".join(command) + "\n" + output)
        return Attempt(program, version, judge(program, status, output, self._expected))

    def _prepare(self, program: Program, work: Path) -> None:
        """Start or measure what the program's command names. Raises RuntimeError."""
        if program.route and not self._served_name:
            self._served_name = wait_ready(f"http://{self._front}/v1")
        if program.uses("tools") and not self._tools:
            log, template = self._setting.cache / "front.log", CLIENTS / "data" / "tools.jinja"
            started = tools_service(self._repository, template, free_ports(1)[0], log)
            self._tools = self._running.enter_context(started)
        if program.uses("lambada") and not self._lambada:
            file, tokenizer = self._setting.lambada, self._tokenizer
            self._lambada = f"{lambada_accuracy(self._server.grpc_url, file, tokenizer, work):.4f}"

    @property
    def _tokenizer(self) -> Path:
        return self._repository / "preprocessing" / "1" / "tokenizer"

    def _install(self, name: str) -> Installed:
        if name not in self._installed:
            print(f"-- environment {name}", flush=True)
            self._installed[name] = environments.install(name, self._setting.cache, self._setting.refresh)
        return self._installed[name]

    def _fill(
        self,
        word: str,
        program: Program,
        installed: Installed,
        source: Path | None,
        work: Path,
        perf: Path | None,
    ) -> str:
        places = {
            "python": installed.python,
            "bin": installed.bin if installed.python else "",
            "http": self._server.http_url,
            "grpc": self._server.grpc_url,
            "grpc_port": self._server.grpc_port,
            "openai": f"http://{self._front}/v1",
            "front": self._front,
            "tools": self._tools,
            "lambada": self._lambada,
            "lambada_file": self._setting.lambada,
            "tokenizer": self._tokenizer,
            "folder": installed.folder,
            "work": work,
            "data": CLIENTS / "data",
            "scripts": CLIENTS / "scripts",
            "requests": ROOT / "tools" / "requests",
            "perf_analyzer": perf,
            "source": source,
            "prompt": self._expected.prompt,
            "tokens": TOKENS,
            "model": self._served_name if program.route else program.model,
        }
        return word.format(**places)


def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():
        return "source"
    asked = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return f"source {subprocess.run(asked, capture_output=True, text=True).stdout.strip()}"


def _own_version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10)
    except OSError:
        return ""
    return (done.stdout.split() + ["", ""])[1]


def _environment(installed: Installed, paths: list[Path], work: Path, perf: Path | None) -> dict[str, str]:
    """Return a program's environment: our modules not on its path, its own home, no network access."""
    folders = [str(path) for path in (perf and perf.parent, installed.python and installed.bin) if path]
    known = {
        "PATH": os.pathsep.join([*folders, "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "TERM": "dumb",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NLTK_DATA": str(work),
    }
    known.update({name: NOWHERE for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")})
    known.update({name: "localhost,127.0.0.1" for name in ("no_proxy", "NO_PROXY")})
    if paths:
        known["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return known


def _import_paths(source: Path, root: Path) -> list[Path]:
    """Return the import paths of a checkout's program: root, src, and the parent of its folder."""
    return [root, root / "src", source.parent.parent]


def _bounded(command: list[str], work: Path, env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: the time limit) and all that a program printed; its children end with it."""
    log = work / "log.txt"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror}"
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        with _nobody_left():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, log.read_text(errors="replace")


@contextmanager
def _nobody_left() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        pass


# ---------------------------------------------------------------- the servers


def repository_of(setting: Setting, options: tuple[str, ...]) -> Path:
    """The repository of build-repo's `options`, made where the cache has none. Raises RuntimeError."""
    named = "-".join(word.strip("-") for word in options) or "default"
    setting.cache.mkdir(parents=True, exist_ok=True)
    digest = checkpoint_digest(Path(setting.model), setting.cache / "digests.json") + converter_digest()
    folder = setting.cache / "repositories" / f"{named}-{hashlib.sha256(digest.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    for stale in folder.parent.glob(f"{named}-" + "[0-9a-f]" * 12):
        subprocess.run(["rm", "-rf", "--", str(stale)], check=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tridecode.tools.cli", "build-repo", "--model", setting.model]
    command += ["--output", str(folder), "--no-parity", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode != 0:
        said = [line.strip(" │") for line in done.stderr.splitlines() if line.strip(" │╭─╮╰╯")]
        raise RuntimeError(f"build-repo {' '.join(options)}: {said[-1] if said else done.returncode}")
    return folder


@contextmanager
def serving(setting: Setting, options: tuple[str, ...]) -> Iterator[Runner]:
    """A server with the repository of `options`, and what it answers to the prompt."""
    repository = repository_of(setting, options)
    log = setting.cache / "serve.log"
    (port,) = free_ports(1)
    with running_server(repository, 600.0, log_file=log, options=("--openai-port", str(port))) as server:
        body = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
        status, answer = post(server.http_url, f"{BLS}/generate", body)
        if status == 404:  # a repository whose text model has the other name
            status, answer = post(server.http_url, "ensemble/generate", body)
        if status != 200:
            raise RuntimeError(f"the server answers {status}: {answer}")
        text = json.loads(answer)["text_output"]
        _, answer = post(server.http_url, f"{BLS}/generate", {**body, "beam_width": 2})
        found = json.loads(answer).get("text_output", "")
        beams = found if isinstance(found, str) else found[0]  # a model with one response sends them all
        print(f"== build-repo {' '.join(options) or 'without options'}: {PROMPT!r} -> {text!r}", flush=True)
        expected = Expected(PROMPT, text, beams, _chat_answer(server, repository))
        runner = Runner(setting, repository, server, port, expected)
        try:
            yield runner
        finally:
            runner.close()


def _chat_answer(server: ServerProcess, repository: Path) -> str:
    """Triton's answer to the prompt as a chat; "": the checkpoint has no template."""
    try:
        prompt = chat_prompt(repository / "preprocessing" / "1" / "tokenizer", PROMPT)
    except (OSError, ValueError):
        return ""
    body = {"text_input": prompt, "max_tokens": TOKENS, "exclude_input_in_output": True}
    status, answer = post(server.http_url, f"{BLS}/generate", {**body, "add_special_tokens": False})
    return json.loads(answer)["text_output"] if status == 200 else ""


def run_all(programs: list[Program], setting: Setting) -> list[table.Row]:
    """A row for each program, in their order."""
    attempts: dict[Program, Attempt] = {}
    with serving(setting, ()) as runner:
        for program in programs:
            attempts[program] = _told(runner.attempt(program))
    with_option: dict[Program, tuple[tuple[str, ...], Attempt]] = {}
    again: dict[tuple[str, ...], list[Program]] = {}
    for program, attempt in attempts.items():
        options = EXCLUDE if attempt.verdict.note == PROMPT_FIRST else program.options
        if options and (not attempt.verdict.works or options == EXCLUDE):
            again.setdefault(options, []).append(program)
    for options, held in again.items():
        try:
            with serving(setting, options) as runner:
                for program in held:
                    with_option[program] = (options, _told(runner.attempt(program)))
        except RuntimeError as error:
            for program in held:
                with_option[program] = (options, Attempt(program, "", Verdict(False, shorten(str(error)))))
    return [row_of(attempts[program], with_option.get(program)) for program in programs]


def _told(attempt: Attempt) -> Attempt:
    print(f"   {attempt.program.name}, {attempt.program.use}: {attempt.verdict}", flush=True)
    return attempt


# ---------------------------------------------------------------- the table


def row_of(first: Attempt, second: tuple[tuple[str, ...], Attempt] | None) -> table.Row:
    """first: on the default repository; second: on one of the options that were needed, if any were."""
    program = first.program
    verdict = _verdict(first, second)
    how = program.use + (table.REPLAYED if first.replayed else "")
    version = first.version or ("" if program.command else program.flag)
    return table.Row(program.name, version, how, program.route or program.model, verdict)


def _verdict(first: Attempt, second: tuple[tuple[str, ...], Attempt] | None) -> str:
    program, note = first.program, first.verdict.note
    flag = f" with {program.flag}" if program.flag and program.command else ""
    if second is not None:
        options, attempt = second
        named = f"`{' '.join(options)}`"
        if first.verdict.works:
            return (
                f"works{flag}: {note}, without it on a repository of {named}"
                if (attempt.verdict.works and not attempt.verdict.note)
                else f"works{flag}: {note}"
            )
        if attempt.verdict.works:
            joined = f"{flag} and {named}" if flag else f" with {named}"
            return f"works{joined}" + (f": {attempt.verdict.note}" if attempt.verdict.note else "")
        return f"does not: {program.why or attempt.verdict.note}"
    if first.verdict.works:
        return f"works{flag}" + (f": {note}" if note else "")
    return f"does not: {program.why or note}"


def unexpected(programs: list[Program], rows: list[table.Row]) -> list[Program]:
    """The programs that do not work, and for which no reason is known. rows: one of each."""
    pairs = zip(programs, rows)
    return [program for program, row in pairs if not (row.verdict.startswith("works") or program.why)]


def summary(rows: list[table.Row]) -> str:
    plain = sum(row.verdict.startswith("works") and " with " not in row.verdict for row in rows)
    flags = sum(row.verdict.startswith("works") for row in rows) - plain
    return f"{len(rows)} uses: {plain} work as they are, {flags} with an option or a version, " + (
        f"{len(rows) - plain - flags} do not."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", help="run the uses that this regular expression finds, and replace their rows"
    )
    parser.add_argument("--model", default="", help="default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--sources", type=Path, default=CACHE / "sources", help="checkouts of programs")
    parser.add_argument("--refresh", action="store_true", help="install the newest versions again")
    parser.add_argument("--lambada", type=Path, help="lambada_test.jsonl; default: three sentences of ours")
    options = parser.parse_args()
    setting = Setting(
        CACHE, options.sources.resolve(), options.model or str(packaged_model()), options.refresh
    )
    if options.lambada:
        setting = replace(setting, lambada=options.lambada.resolve())
    wanted = re.compile(options.only, re.IGNORECASE)
    chosen = [
        program for program in PROGRAMS if wanted.search(f"{program.name} {program.use} {program.route}")
    ]
    started = time.monotonic()
    rows = ran = run_all(chosen, setting)
    for row in rows:
        print(" | ".join((row.program, row.version, row.how, row.model, row.verdict)))
    print(f"{summary(rows)} {time.monotonic() - started:.0f} s")
    file = ROOT / "docs" / "guides" / "clients.md"
    order = [(program.name, program.use) for program in PROGRAMS]
    rows = table.merged(table.read(file) if options.only else [], rows, order)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    made = f"`make clients` of {now}, {Path(setting.model).stem}, Python {platform.python_version()}"
    table.write(file, rows, f"{made}. {summary(rows)}")
    print(f"written to {file.relative_to(ROOT)}; the output of the programs is in {CACHE / 'work'}")
    failed = unexpected(chosen, ran)
    for program in failed:
        print(f"not expected to fail: {program.name}, {program.use}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
