"""The tokenizer of text requests, loaded from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tridecode.backend.service.text_request import Prompt
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.encoding import encode
from tridecode.backend.text.tokenizer_files import cleans_up, end_token_id, load_tokenizer


class TextTokenizer:
    """end_id: id of the tokenizer's end token; -1: it has none. view: decodes answers by default."""

    def __init__(self, folder: Path, setting: str = "", skip_special_tokens: bool = True):
        """setting: the setting that names the folder, for errors. Raises ConfigError."""
        self.folder = folder
        self.tokenizer = load_tokenizer(folder, setting or "the tokenizer's folder")
        self.end_id = end_token_id(folder, self.tokenizer)
        self._cleans_up = cleans_up(folder, self.tokenizer)
        self._skips = skip_special_tokens
        self._views: dict[tuple[bool, tuple[str, ...]], TokenizerView] = {}
        self.view = self.view_of(skip_special_tokens)

    def view_of(self, skip_special: bool | None, shown: tuple[str, ...] = ()) -> TokenizerView:
        """Return the view that decodes with or without special tokens; None: the default.

        The first use of a view reads the whole tokenizer.
        """
        key = self._skips if skip_special is None else skip_special, shown
        if key not in self._views:
            self._views[key] = TokenizerView(self.tokenizer, key[0], self._cleans_up, shown)
        return self._views[key]

    def ids(self, prompts: Sequence[Prompt], add_special_tokens: bool) -> Iterator[list[int]]:
        """Yield the token ids of each prompt.

        Lazy: texts that the caller does not reach are not tokenised.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = encode(self.tokenizer, texts, add_special_tokens)
        for prompt in prompts:
            yield next(encoded) if isinstance(prompt, str) else list(prompt)

    def text(self, prompt: Prompt) -> str:
        """Return the text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        return self.view.text(self.view.shown(list(prompt)))
