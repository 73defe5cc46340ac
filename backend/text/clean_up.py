"""transformers' clean_up_tokenization_spaces: removes blanks before punctuation and English contractions.

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
#: Places where the text can be split and both sides cleaned separately with the same result: after a
#: character that occurs in no replacement; between two characters that stay neighbours (only blanks are
#: removed) and are not neighbours in a replacement; and in a run of blanks, further from its ends than all
#: replacements together could remove.
_PLACE = re.compile(r"(?<=[^ .?!,'ntmsvre])|(?<=[^ '])(?<!v(?=e))(?<!r(?=e))(?=[^ '])|(?<=  )(?= {12})")


def clean_up(text: str) -> str:
    """Return the whole text as cleaned by transformers' clean_up_tokenization."""
    for found, replacement in _REPLACED:
        text = text.replace(found, replacement)
    return text


class StreamCleanUp:
    """Cleans up text that arrives in pieces. The concatenated output equals clean_up() of the whole. Text
    after the last place at which it can be split is held back: a few characters, unless it consists of single
    letters, apostrophes and blanks.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Return the cleaned text that later pieces cannot change; may be empty."""
        start = max(0, len(self._held) - 16)  # no new split place before it
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
