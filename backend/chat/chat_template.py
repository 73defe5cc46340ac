"""The chat template of a tokenizer folder: where it is found, and the prompt that it makes of messages.

A template comes with the checkpoint and is not trusted: it runs in a child process with limits of time and
memory (templates.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridecode.backend.base.checkpoint_files import read_json, require_file
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.chat.templates import render_template

_MAX_FILE_BYTES = 16 << 20  # template or tokenizer_config.json; LLaMA-3.1's template has 4 kB


@dataclass(frozen=True)
class ChatTemplate:
    """path: the file that has the template; source: its text. special_tokens: bos_token, eos_token and other
    *_token settings, as texts."""

    path: Path
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, tokenizer_dir: Path, given: Path | None = None) -> ChatTemplate | None:
        """The template in the file `given`; else chat_template.jinja, or chat_template in
        tokenizer_config.json, there the one named "default" of several. None for a model without one. Raises
        CheckpointError for files that cannot be read."""
        path = tokenizer_dir / "tokenizer_config.json"
        settings = read_json(path, _MAX_FILE_BYTES) if path.is_file() else {}
        file = given or tokenizer_dir / "chat_template.jinja"
        if given is not None or file.is_file():
            return cls(file, _read(file), _special_tokens(settings))
        template = settings.get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        return cls(path, template, _special_tokens(settings)) if isinstance(template, str) else None

    @property
    def bos_token(self) -> str:
        return self.special_tokens.get("bos_token", "")

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt of the messages, with the generation prompt and, where the template writes one, a BOS:
        to be tokenised without special tokens. values: other variables of the template, as `tools`.

        Raises TemplateFault.
        """
        variables = {
            "messages": list(messages),
            "add_generation_prompt": True,
            **self.special_tokens,
            **values,
        }
        return render_template(self.source, variables)


def _read(path: Path) -> str:
    """The text of a regular file of at most _MAX_FILE_BYTES. Raises CheckpointError."""
    try:
        return require_file(path, _MAX_FILE_BYTES).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
