"""Renders messages and tools of chats to prompts with the chat template, in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tridecode.backend.chat.async_templates import AsyncTemplateRenderer
from tridecode.backend.chat.chat_template import ChatTemplate, template_variables
from tridecode.backend.chat.child_process import RendererDown, TemplateFault
from tridecode.backend.chat.fields import FieldError, UnsupportedField, shown
from tridecode.backend.chat.messages import reads_parts, template_messages
from tridecode.backend.chat.tool_formats import find_format
from tridecode.backend.chat.tools import ToolPlan, plan_tools, read_tools
from tridecode.backend.front.errors import ApiError, bad_request
from tridecode.backend.front.fields.chat import ChatRequest


class ChatPrompts:
    """Renderer of one event loop. parser: name of the format of tool calls; "": the template's."""

    def __init__(self, tokenizer_dir: Path, template: Path | None, parser: str):
        self._folder, self._given, self._parser = tokenizer_dir, template, parser or None
        self._renderer = AsyncTemplateRenderer()
        self._template: ChatTemplate | None = None
        self._read = False
        self._reads_parts: bool | None = None

    def template(self) -> ChatTemplate | None:
        """Return None for a model without one. Raises CheckpointError if it cannot be read."""
        if not self._read:
            self._template = ChatTemplate.find(self._folder, self._given)
            self._read = True
        return self._template

    def shown_tokens(self) -> tuple[str, ...]:
        """Return the special tokens that the answers to requests with tools show."""
        template = self.template()
        kind = None if template is None else find_format(template.source_for([]), self._parser)
        return () if kind is None else kind.shown_tokens

    async def start(self) -> None:
        """Start the process and find out which variables the template reads, before the first request."""
        template = self.template()
        if template is not None:
            await self._parts(template)

    def close(self) -> None:
        self._renderer.kill()

    async def prompt(self, wanted: ChatRequest) -> tuple[str, ToolPlan | None]:
        """Return the prompt and the ToolPlan of the answer. Raises ApiError and TridecodeErrors."""
        template = self.template()
        if template is None:
            text = "the model has no chat template; send a prompt to /v1/completions"
            text += ", or start with --chat-template"
            raise ApiError(400, text, param="messages", code="no_chat_template")
        tools = read_tools(wanted.tools, wanted.tool_choice, wanted.parallel_tool_calls)
        plan = None if tools is None else plan_tools(tools, template, self._parser)
        continues = bool(wanted.continue_final_message)
        if continues and plan is not None and plan.suffix:
            raise UnsupportedField("continue_final_message", "is true and tool_choice forces a call")
        generates = wanted.add_generation_prompt
        try:
            messages = template_messages(
                [msgspec.to_builtins(message) for message in wanted.messages], await self._parts(template)
            )
            text = await template.render_with(
                self._renderer,
                messages,
                tools=None if plan is None else plan.schemas,
                documents=_documents(wanted.documents),
                add_generation_prompt=not continues if generates is None else generates,
                continue_final_message=continues,
                **template_variables(wanted.chat_template_kwargs or {}),
            )
        except RendererDown as error:
            headers = {"retry-after": "1"}
            raise ApiError(
                503, str(error), kind="service_unavailable_error", code="not_ready", headers=headers
            ) from None
        except TemplateFault as fault:
            found = f"the model's chat template does not accept the messages: {fault}"
            raise bad_request(found, "messages", "invalid_messages") from None
        return text + ("" if plan is None else plan.suffix), plan

    async def _parts(self, template: ChatTemplate) -> bool:
        if self._reads_parts is None:
            self._reads_parts = await reads_parts(template, self._renderer)
        return self._reads_parts


def _documents(documents: Any) -> list[Any] | None:
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(one, dict) for one in documents):
        raise FieldError("documents", f"is {shown(documents)}; wanted a list of JSON objects")
    return documents
