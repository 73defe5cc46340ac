"""Runs every command in README.md and docs/ against a served repository, or lists why it is not run.

A command that is in neither list fails test_every_command_is_run_or_listed: add it to RUN or to LISTED. Its
options and the files of this project that it names must exist.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import typer.main

from tests.desk import BUILD, Desk
from tridecode.tools.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
PLACEHOLDER = "<directory, hub id or .gguf>"

#: prefix of our own commands, with environment variables before it
OURS = r"(\w+=(\S+|\$\([^)]*\)) )*tridecode "
#: first words of fences that hold drawings instead of commands
DRAWINGS = ("client ── gRPC", "tools → converters", "backend/               doors/")

#: commands that are run, with the ports of the test's server instead of 8000 and 8001; the first match counts
RUN = (
    r"tridecode build-repo --model <[^>]*> --output models$",
    r"tridecode check models",
    r"tridecode generate (?!.*--(schema|tools) )",
    r"tridecode send-request (tools/requests/)?\S+\.json",
    r"curl .*localhost:8000/v2/models/",
    r"echo '.*' > \w+\.(json|jinja)$",
)
#: commands that are not run here, and why
LISTED = {
    r"make (demo|test|nightly|test-gpu|clients|front-pythons|soak|fuzz|kernels|bench|install)\b":
        "installs, or takes minutes",
    OURS + "serve ": "the server of this test runs so, on free ports",
    r"tridecode batch ": "needs a file and a service: tests/integration/test_quick_start.py runs it",
    r"echo '.*' > requests\.jsonl$|cat answers\.jsonl$": "tests/integration/test_quick_start.py runs it",
    r"tridecode front ": "serves on a fixed port: tests/backend/front runs it on a free one",
    r"curl .*localhost:9000/": "the OpenAI service's port: tests/backend/front sends such requests",
    r"(mpirun|srun) ": "needs several nodes: tests/integration/test_nodes.py runs mpirun on one",
    r"tridecode tritonserver ": "serves on fixed ports",
    r"tridecode build-repo ": "the same as the first one with an option",
    r"tridecode generate .*--schema ": "needs a schema: tests/tools/client/test_forms.py runs it",
    r"tridecode generate .*--tools ": "needs a file of tools: tests/tools/client/test_forms.py runs it",
    r"tridecode chat ": "a terminal: tests/tools/chat runs it",
    r"tridecode cache ": "the user's own cache: tests/tools/build_repo/test_cache_commands.py runs it",
    r"tridecode demo\b": "downloads a model",
    r"tridecode doctor": "what it finds depends on the machine",
    r"tridecode evaluate-lambada ": "needs LAMBADA's file, which is not ours",
    r"tridecode evaluate-prompts ": "needs a trained task: tests/integration/test_prompt_learning.py runs it",
    r"tridecode train-draft ": "needs a model to train for: tests/tools/train_draft runs it",
    r"tridecode adapters ": "needs an adapter: tests/tools/adapters/test_adapters.py runs them",
    r"tridecode bench load ": "takes a minute or more",
    r"tridecode bench ": "needs a GPU and takes minutes",
    r"python -m tridecode\.tools\.bench\.studies\.ranks ": "needs several GPUs and takes minutes",
    r"(CUDA_VISIBLE_DEVICES=0 )?python -m tridecode\.tools\.bench\.published ":
        "needs GPUs: tests/tools/bench/test_published.py runs it with a small model",
    r"python -m tridecode\.tools\.bench\.studies\.floors": "reads results: test_floors.py runs it",
    r"python -m tridecode\.kernels\.": "needs a GPU or nvcc",
    r"(PYTHONPATH=\$PWD )?python (tools/)?(gpt/)?(identity_test|end_to_end_test|issue_request|evaluate_)":
        "FasterTransformer's program: `make clients` runs it",
    r"python client\.py ": "vLLM's client: `make clients` runs it",
    r"python (inflight_batcher_llm_client|benchmark_core_model)\.py ":
        "TensorRT-LLM's program: `make clients` runs it",
    r"(pip|python -m pip) (install|download) ": "the network",
    r"python -m zipfile -e tritonclient|libs=\$\(python|ln -s \"\$libs\"|export LD_LIBRARY_PATH=\$PWD/pa":
        "follows a download: `make clients` does the same",
    r"perf_analyzer=|load=|stream=|\$perf_analyzer ": "perf_analyzer: `make clients` runs it",
    r"genai-perf profile ": "genai-perf: `make clients` runs it",
    r"aiperf profile ": "AIPerf: `make clients` runs it",
    r"lm_eval |guidellm run ": "a client of the OpenAI service: `make clients` runs it",
    r"python -m tests\.": "takes minutes",
    r"curl .*tridecode-control": "needs the key of one run",
    r"curl localhost:8002/metrics": "tests/backend/doors/test_real_metrics.py reads the page",
    r"docker |openssl |nginx|kubectl |enroot |(\w+=\S+ )*sbatch ": "an external program",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command of a page, continuation lines included. where: file and line of its fence."""

    where: str
    text: str


def fences(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file and line, language and text of each fence of a page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield f"{page.relative_to(ROOT)}:{line}", found[1], found[2]


def split(block: str) -> Iterator[str]:
    """Yield the commands of a block without comments; a backslash or an open quote continues a line."""
    held = ""
    for line in block.splitlines():
        held += line
        if held.endswith("\\") or _open_quote(held):
            held += "\n"
        else:
            text = re.sub(r"(^|\s)#[^'\"]*$", "", held).strip()
            held = ""
            if text:
                yield text
    assert not held, f"a quote or a line is not ended: {held!r}"


def _open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def all_commands() -> list[Command]:
    blocks = [
        (where, text)
        for page in PAGES
        for where, language, text in fences(page)
        if language in SHELL and not text.startswith(DRAWINGS)
    ]
    return [Command(where, text) for where, block in blocks for text in split(block)]


COMMANDS = all_commands()


def is_run(command: Command) -> bool:
    return any(re.match(pattern, command.text, re.DOTALL) for pattern in RUN)


def named(command: Command) -> str:
    return f"{command.where} {' '.join(command.text.split())[:60]}"


def options_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the subcommand of `tridecode` that `words` call, and the options in it that do not exist."""
    found: click.Command = typer.main.get_command(app)
    path = [words[0]]
    rest = words[1 : words.index("--")] if "--" in words else words[1:]
    while isinstance(found, click.Group) or hasattr(found, "commands"):
        below = getattr(found, "commands", {})
        if not rest or rest[0] not in below:
            break
        path.append(rest[0])
        found, rest = below[rest[0]], rest[1:]
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
    return " ".join(path), [option for option in given if option not in known | {"--help"}]


# ---------------------------------------------------------------- every command


def test_the_pages_have_commands_of_both_kinds() -> None:
    assert sum(map(is_run, COMMANDS)) >= 10 and not all(map(is_run, COMMANDS))


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_every_command_is_run_or_listed(command: Command) -> None:
    listed = [pattern for pattern in LISTED if re.match(pattern, command.text)]
    assert is_run(command) or listed, f"{command.where}: add it to RUN or LISTED: {command.text}"


@pytest.mark.parametrize("command", [one for one in COMMANDS if re.match(OURS, one.text)], ids=named)
def test_its_subcommand_and_options_exist(command: Command) -> None:
    text = re.sub(OURS, "tridecode ", command.text.replace(PLACEHOLDER, "checkpoint"), count=1)
    path, unknown = options_of(shlex.split(text, comments=True))
    assert " " in path, f"{command.where}: no such command: {command.text}"
    assert unknown == [], f"{command.where}: {path} has no {unknown}"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.text.startswith("make ")], ids=named)
def test_its_target_exists(command: Command) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.text.split()[1] in targets, command.where


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_the_files_of_this_project_that_it_names_exist(command: Command) -> None:
    for path in re.findall(
        r"(?<![\w/$.-])(?:tools/requests|docs|tests|kernels|backend)/[\w./-]+", command.text
    ):
        assert (ROOT / path).exists(), f"{command.where}: {path}"
    for name in re.findall(r"\$requests/(\S+)|\bsend-request (?!tools/)(\S+\.json)", command.text):
        assert (ROOT / "tools" / "requests" / Path("".join(name)).name).is_file(), f"{command.where}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_links_to_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


def sections(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_sections_that_a_page_links_to_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, section in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
        assert section in sections(page.parent / target if target else page), f"{target}#{section}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text() + (ROOT / "docs" / "lab" / "README.md").read_text()
    missing = [page.name for page in PAGES if page.name != "README.md" and f"{page.name})" not in index]
    assert missing == []


def test_python_examples_compile() -> None:
    for page in PAGES:
        for where, language, text in fences(page):
            if language == "python":
                compile(text, where, "exec")
            elif language == "json":
                json.loads(text)


def test_a_command_may_be_continued_and_commented() -> None:
    block = "a 'b\n c'  # why\ncurl -d \\\n  x\n\n# alone\nd"
    assert list(split(block)) == ["a 'b\n c'", "curl -d \\\n  x", "d"]


@pytest.mark.parametrize(
    ("text", "unknown"),
    [("tridecode check models --checksum", ["--checksum"]), ("tridecode serve m -- --log-verbose=1", [])],
)
def test_an_option_that_does_not_exist_is_noticed(text: str, unknown: list[str]) -> None:
    assert options_of(text.split())[1] == unknown


# ---------------------------------------------------------------- those that are run


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("text", sorted({one.text for one in COMMANDS if is_run(one)}))
def test_it_runs(desk: Desk, text: str) -> None:
    if re.match(RUN[0], text):
        assert text.replace(PLACEHOLDER, "{checkpoint}") == BUILD
        assert (desk.folder / "models" / "PARITY.json").is_file()  # the fixture has run it
        return
    shown = desk.run(text)
    if text.startswith("echo"):
        written = (desk.folder / text.split()[-1]).read_text()
        assert text.endswith(".jinja") or json.loads(written)
    else:
        assert shown.strip() and '"error"' not in shown
