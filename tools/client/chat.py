"""Chat for the command line: the tokenizer of a served model, and the prompt of one question."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.chat.templates import TemplateFault
from tridecode.backend.supervisor import processes
from tridecode.model_repo_templates.repository import TOKENIZER_DIR
from tridecode.tools.client.generate import GRPC_PORT, TemplatedPrompt
from tridecode.tools.serve.checks import repositories
from tridecode.tools.serve.triton_access import values_of

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


# ---------------------------------------------------------------- where the template is


def find_tokenizer_dir(given: Path | None, url: str) -> Path:
    """The tokenizer folder of `given` (a repository, a tokenizer folder or a tokenizer.json), or of the
    repository that a tritonserver of this machine serves at gRPC address `url`. ConfigError where there is
    none.
    """
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
        except OSError:  # the process has just ended, or belongs to another user
            if os.path.isabs(folder):
                return Path(folder)
    return None


def _trusted(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in (0, os.getuid())
    except OSError:
        return False


# ---------------------------------------------------------------- rendering


def find_template(tokenizer_dir: Path, given: Path | None = None) -> ChatTemplate:
    """Return the chat template in the file `given`, or the template of a tokenizer folder. Raises
    CheckpointError for a file that cannot be read, and for a model without a template.
    """
    template = ChatTemplate.find(tokenizer_dir, given)
    if template is None:
        raise CheckpointError(f"{tokenizer_dir} has no chat template; it is not a chat model's tokenizer")
    return template


def chat_prompt(
    tokenizer_dir: Path,
    question: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    suffix: str = "",
    template_file: Path | None = None,
) -> TemplatedPrompt:
    """Render the question as a user's first message in the model's chat template, with the generation prompt.

    tools: the template's variable. suffix: text that the answer continues. template_file: replaces the
    model's template. Raises CheckpointError for a model without a template and for a template that fails.
    """
    template = find_template(tokenizer_dir, template_file)
    try:
        rendered = template.render([{"role": "user", "content": question}], tools=tools) + suffix
    except TemplateFault as fault:
        raise CheckpointError(f"{template.path} does not run: {fault}") from None
    return TemplatedPrompt(rendered, _without_second_bos(rendered, tokenizer_dir, template.bos_token))


def _without_second_bos(text: str, tokenizer_dir: Path, bos: str) -> str:
    """Drop the template's BOS where the tokenizer adds one itself."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    added = tokenizer.encode("").ids
    if bos and text.startswith(bos) and added[:1] == [tokenizer.token_to_id(bos)]:
        return text[len(bos) :]
    return text
