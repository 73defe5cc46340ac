"""Chat templates: where a model's template is found, and the prompt that it renders from one question.

A template comes with the checkpoint and is not trusted: it runs in a child process with limits of time and
memory (backend/chat/templates.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.chat.templates import TemplateFault, render_template
from tridecode.backend.supervisor import processes
from tridecode.converters.files import read_json, require_file
from tridecode.model_repo_templates.repository import TOKENIZER_DIR
from tridecode.tools.generate import GRPC_PORT, TemplatedPrompt
from tridecode.tools.serve.checks import repositories
from tridecode.tools.serve.triton_access import values_of

_MAX_FILE_BYTES = 16 << 20  # template or tokenizer_config.json; LLaMA-3.1's template has 4 kB
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


# ---------------------------------------------------------------- where the template is


def find_tokenizer_dir(given: Path | None, url: str) -> Path:
    """The tokenizer folder of `given` (a repository, a tokenizer folder or a tokenizer.json), or of the
    repository that a tritonserver of this machine serves at gRPC address `url`. ConfigError where there is
    none."""
    root = given if given is not None else served_repository(url)
    if root is None:
        found = f"no tritonserver of this machine serves {url}"
        raise ConfigError(f"{found}; name a repository or tokenizer folder: --tokenizer DIR")
    places = (root.parent if root.name == "tokenizer.json" else root, root / TOKENIZER_DIR)
    for place in (*places, *sorted(root.glob("*/1/tokenizer"))):
        if (place / "tokenizer.json").is_file():
            return place
    raise ConfigError(f"{root} has no tokenizer.json; wanted a repository or a tokenizer folder")


def served_repository(url: str) -> Path | None:
    """The model repository of the tritonserver on this machine whose gRPC port is that of `url`, or None.

    url: host:port. Read from the command lines of this user's and root's processes.
    """
    host, _, port = url.rpartition(":")
    if host.strip("[]") not in (*_LOOPBACK, socket.gethostname()):
        return None
    for pid in processes.all_pids():
        arguments = processes.command_line(pid) or [""]
        if os.path.basename(arguments[0]) != "tritonserver":
            continue
        folders = repositories(arguments)
        ports = values_of(arguments, "grpc-port") or [str(GRPC_PORT)]
        if not folders or ports[-1] != port or not _trusted(pid):
            continue
        folder = folders[-1]
        try:
            return Path(os.readlink(f"/proc/{pid}/cwd"), folder)
        except OSError:  # it has just ended, or belongs to another user
            if os.path.isabs(folder):
                return Path(folder)
    return None


def _trusted(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in (0, os.getuid())
    except OSError:
        return False


# ---------------------------------------------------------------- rendering


def chat_template(tokenizer_dir: Path) -> tuple[Path, str] | None:
    """(file, source) of the model's chat template: chat_template.jinja, or chat_template in
    tokenizer_config.json, there the one named "default" of several. None for a model without one."""
    path = tokenizer_dir / "chat_template.jinja"
    if path.is_file():
        return path, _read(path)
    path = tokenizer_dir / "tokenizer_config.json"
    template = _tokenizer_config(tokenizer_dir).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return (path, template) if isinstance(template, str) else None


def chat_prompt(tokenizer_dir: Path, question: str) -> TemplatedPrompt:
    """The question as a user's first message in the model's chat template, with the generation prompt.

    Raises CheckpointError for a model without a template and for a template that fails.
    """
    found = chat_template(tokenizer_dir)
    if found is None:
        raise CheckpointError(f"{tokenizer_dir} has no chat template; it is not a chat model's tokenizer")
    path, source = found
    special = _special_tokens(tokenizer_dir)
    messages = [{"role": "user", "content": question}]
    try:
        values = {"messages": messages, "add_generation_prompt": True, **special}
        rendered = render_template(source, values)
    except TemplateFault as fault:
        raise CheckpointError(f"{path} does not run: {fault}") from None
    return TemplatedPrompt(
        rendered, _without_second_bos(rendered, tokenizer_dir, special.get("bos_token", ""))
    )


def _read(path: Path) -> str:
    """The text of a regular file of at most _MAX_FILE_BYTES. Raises CheckpointError."""
    try:
        return require_file(path, _MAX_FILE_BYTES).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _tokenizer_config(tokenizer_dir: Path) -> Mapping[str, Any]:
    path = tokenizer_dir / "tokenizer_config.json"
    return read_json(path, _MAX_FILE_BYTES) if path.is_file() else {}


def _special_tokens(tokenizer_dir: Path) -> dict[str, str]:
    """bos_token, eos_token and other *_token settings, as texts."""
    settings = _tokenizer_config(tokenizer_dir)
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _without_second_bos(text: str, tokenizer_dir: Path, bos: str) -> str:
    """Drop the template's BOS where the tokenizer adds one itself."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    added = tokenizer.encode("").ids
    if bos and text.startswith(bos) and added[:1] == [tokenizer.token_to_id(bos)]:
        return text[len(bos) :]
    return text
