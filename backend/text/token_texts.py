"""The text of single tokens, as in the middle of a text, for log probabilities by token."""

from __future__ import annotations

from tridecode.backend.text.detokenizer import TokenizerView


class TokenTexts:
    """Maps token ids to their texts, which are cached. A token that is part of a character gives U+FFFD, a
    special token its name, an id that the tokenizer does not know "".

    A decoder strips the space of the first token that it decodes, so a token is decoded after another one.
    """

    def __init__(self, view: TokenizerView):
        self._view = view
        anchor = view.tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor, self._skipped = anchor, view.decode(anchor)
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decode(token)
        return text

    def _decode(self, token: int) -> str:
        if self._view.tokenizer.id_to_token(token) is None:
            return ""
        text = self._view.decode([*self._anchor, token])
        if text.startswith(self._skipped):
            return text[len(self._skipped) :]
        return self._view.decode([token])
