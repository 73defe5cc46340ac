"""Finds the chat template of a tokenizer folder and renders messages to a prompt.

A template comes with the checkpoint and is not trusted: it runs in a child process with limits of time and
memory (templates.py, async_templates.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridecode.backend.base.checkpoint_files import read_json, require_file
from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.chat.async_templates import AsyncTemplateRenderer
from tridecode.backend.chat.fields import FieldError, shown
from tridecode.backend.chat.templates import render_template

_MAX_FILE_BYTES = 16 << 20  # template or tokenizer_config.json; LLaMA-3.1's template has 4 kB
_TOOL_USE = "additional_chat_templates/tool_use.jinja"
#: variables with a request field of their own, or that a request must not set
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
#: marks the end of the text that the model continues; template output after it is cut off
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class RenderJob:
    """One render: a template, its variables, and the text that the prompt has to end with.

    final_text: text of the last message, which the answer continues; None: a new answer.
    """

    source: str
    values: dict[str, Any]
    final_text: str | None = None

    def prompt(self, rendered: str) -> str:
        """Make the prompt from the rendered text. Raises FieldError if it lacks final_text."""
        if self.final_text is None:
            return rendered
        place = rendered.rfind(_TAG.strip())
        if place < 0 or self.final_text.strip() not in rendered:
            text = "is true, and the model's chat template does not show the whole text of the last message"
            raise FieldError("continue_final_message", text)
        kept = rendered[:place]
        return kept if rendered.startswith(_TAG, place) else kept.rstrip()  # the template strips texts


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. path: its file; source: its text. special_tokens: bos_token, eos_token and other
    *_token settings, as texts. tool_source: the template for requests with tools; None: the same.
    """

    path: Path
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None

    @classmethod
    def find(cls, tokenizer_dir: Path, given: Path | None = None) -> ChatTemplate | None:
        """Read the template from the file `given`, else from chat_template.jinja, else from chat_template in
        tokenizer_config.json. Of several, "default" is used, and "tool_use" for requests with tools.

        None for a model without a template. Raises CheckpointError for files that cannot be read.
        """
        path = tokenizer_dir / "tokenizer_config.json"
        settings = read_json(path, _MAX_FILE_BYTES) if path.is_file() else {}
        tokens = _special_tokens(settings)
        if given is not None:
            return cls(given, _read(given), tokens)
        file, tool_file = tokenizer_dir / "chat_template.jinja", tokenizer_dir / _TOOL_USE
        if file.is_file():
            return cls(file, _read(file), tokens, _read(tool_file) if tool_file.is_file() else None)
        template, tool_use = settings.get("chat_template"), None
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template, tool_use = named.get("default"), named.get("tool_use")
        if not isinstance(template, str):
            return None
        return cls(path, template, tokens, tool_use if isinstance(tool_use, str) else None)

    @property
    def bos_token(self) -> str:
        return self.special_tokens.get("bos_token", "")

    def source_for(self, tools: object) -> str:
        """Return the template's text for a request with these tools, or without any."""
        return self.tool_source if tools is not None and self.tool_source is not None else self.source

    def job(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,
    ) -> RenderJob:
        """Prepare the render of messages; the arguments are those of transformers' apply_chat_template.

        continue_final_message: the prompt ends with the text of the last message, which the model continues.
        values: other variables of the template. Raises FieldError.
        """
        source, shown, final_text = self.source_for(tools), [_aliased(one) for one in messages], None
        if continue_final_message:
            if add_generation_prompt:
                raise FieldError("continue_final_message", "and add_generation_prompt are both true")
            final_text = _mark_final(shown)
        variables = {
            **self.special_tokens,
            **values,
            "messages": shown,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        return RenderJob(source, variables, final_text)

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render the messages with the generation prompt and, if the template writes one, a BOS.

        Tokenise the result without special tokens. arguments: see `job`.

        Raises TemplateFault, and FieldError as `job` does.
        """
        job = self.job(messages, **arguments)
        return job.prompt(render_template(job.source, job.values))

    async def render_with(
        self, renderer: AsyncTemplateRenderer, messages: Sequence[Mapping[str, Any]], **arguments: Any
    ) -> str:
        """Call `render` in the child of an event loop. Also raises CapacityError."""
        job = self.job(messages, **arguments)
        return job.prompt(await renderer.render(job.source, job.values))


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _aliased(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message, with its reasoning under the names that templates read."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def template_variables(sent: Mapping[str, Any], name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return the template variables that a request sets in the field `name`. Raises FieldError."""
    for key in sent:
        if key in _RESERVED or key in ("chat_template", "tokenize"):
            raise FieldError(name, f"has {shown(key)}, which is not a variable to be set here")
        if not key.isidentifier():
            raise FieldError(name, f"has the key {shown(key)}; wanted names of variables")
    return dict(sent)


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Append the tag to the text of the last message. Returns the text. Raises RequestError."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _TAG
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    last = next((i for i in reversed(range(len(parts))) if "text" in parts[i]), None)
    if last is None:
        raise FieldError("continue_final_message", "is true, and the last message has no text to continue")
    text = str(parts[last]["text"])
    messages[-1]["content"] = [*parts[:last], {**parts[last], "text": text + _TAG}, *parts[last + 1 :]]
    return text


def _read(path: Path) -> str:
    """Read the text of a regular file of at most _MAX_FILE_BYTES. Raises CheckpointError."""
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
