"""The state of a chat: messages, parameters, and what is saved."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.chat.sources import PARAMETERS, Question


@dataclass
class Conversation:
    """chats: whether the model takes messages; else it continues the text of all turns.

    values: of PARAMETERS, those that are set.
    """

    chats: bool
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def ask(self, text: str) -> Question:
        """Add a turn of the user and return the question."""
        self.messages.append({"role": "user", "content": text})
        return self.question()

    def question(self) -> Question:
        """Return the question whose answer comes next."""
        if self.chats:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return Question(messages=system + self.messages, values=dict(self.values))
        texts = [self.system, *(message["content"] for message in self.messages)]
        return Question(text="".join(texts), values=dict(self.values))

    def answered(self, text: str) -> None:
        """Add the model's turn, or the part of it that was not stopped."""
        self.messages.append({"role": "assistant", "content": text})

    def failed(self) -> None:
        """Take the question without an answer back."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def retry(self) -> Question:
        """Drop the last answer and return its question again. Raises ConfigError before the first answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ConfigError("there is no answer to repeat")
        self.messages.pop()
        return self.question()

    def set_values(self, words: list[str]) -> None:
        """Set NAME=VALUE parameters; NAME= returns one to the model's default. Raises ConfigError."""
        found = dict(self.values)
        for word in words:
            name, equals, text = word.partition("=")
            if not equals or name not in PARAMETERS:
                raise ConfigError(f"{word!r}: wanted NAME=VALUE with a NAME of {', '.join(PARAMETERS)}")
            if not text:
                found.pop(name, None)
                continue
            try:
                found[name] = PARAMETERS[name](text)
            except ValueError:
                raise ConfigError(f"{name} is {text!r}; wanted {_kind(name)}") from None
        self.values = found

    def save(self, file: Path, model: str) -> None:
        """Write the conversation as JSON; `load` reads it. Raises ConfigError."""
        content = {"model": model, "system": self.system, "messages": self.messages, "params": self.values}
        written = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            written.replace(file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from None

    def load(self, file: Path) -> None:
        """Replace the conversation by a saved one. Raises ConfigError."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            messages = [
                {"role": str(one["role"]), "content": str(one["content"])} for one in content["messages"]
            ]
            system = str(content.get("system", ""))
            words = [f"{name}={value}" for name, value in dict(content.get("params", {})).items()]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{file} is not a saved conversation") from None
        self.set_values(words)
        self.system, self.messages = system, messages


def _kind(name: str) -> str:
    return "a whole number" if PARAMETERS[name] is int else "a number"
