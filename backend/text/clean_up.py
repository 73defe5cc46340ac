"""transformers' clean_up_tokenization_spaces: blanks before punctuation and English endings are left out.

Tokenizers of words (WordPiece, WordLevel, some Unigram) were trained on text with such blanks. transformers 5
applies it where tokenizer_config.json says so, except to a BPE model, which writes its blanks itself.
"""

from __future__ import annotations

import re

#: in the order of transformers' clean_up_tokenization: each is replaced everywhere before the next
_REPLACED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
#: The text on both sides of such a place is cleaned apart with the same result: behind a character that no
#: replacement has; between two that stay neighbours (only blanks are removed) and are not neighbours in a
#: replacement; and in a run of blanks further from its ends than all replacements together could remove.
_PLACE = re.compile(r"(?<=[^ .?!,'ntmsvre])|(?<=[^ '])(?<!v(?=e))(?<!r(?=e))(?=[^ '])|(?<=  )(?= {12})")


def clean_up(text: str) -> str:
    """The whole text as transformers' clean_up_tokenization gives it."""
    for found, replacement in _REPLACED:
        text = text.replace(found, replacement)
    return text


class StreamCleanUp:
    """Cleans up text that arrives in pieces. What comes out is clean_up() of the whole.

    Text is held back up to the last place that can be cleaned apart: a few characters, unless it consists of
    single letters, apostrophes and blanks.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The cleaned text that later pieces cannot change; may be empty."""
        start = max(0, len(self._held) - 16)  # before it, no new place has come up
        self._held += text
        place = 0
        for match in _PLACE.finditer(self._held, start):
            place = match.start()
        piece, self._held = clean_up(self._held[:place]), self._held[place:]
        return piece

    def flush(self) -> str:
        """Return the text that was held back; call it once, after the last piece."""
        piece, self._held = clean_up(self._held), ""
        return piece
