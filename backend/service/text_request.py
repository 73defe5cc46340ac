"""A text request, in the form in which every front end passes it to the text service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tridecode.backend.service.learned_prompts import RowPrompt
from tridecode.backend.service.limits import TextLimits
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput

_ID_BYTES = 4

#: a text, or its token ids
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class FieldNames:
    """The client's names of fields, for errors."""

    prompt: str = "text_input"
    max_tokens: str = "max_tokens"
    stop_words: str = "stop_words"
    structured_output: str = "structured_output"
    context_logits: str = "return_context_logits"


@dataclass(frozen=True)
class TextRequest:
    """A request of B texts; lists have one item per text.

    stop_words: matched in the text. exclude: a whole answer does not begin with its prompt. show_stop,
    min_tokens: see Completion. keep_last: number of tokens of a longer prompt to keep, from its end; 0: all.
    skip_special: omit special tokens from the answer, except for shown_tokens; None: use the service's
    setting. log_probs: of alternatives. prompt_log_probs: number of alternatives of each token of the prompt,
    which the answer scores; -1: none. tables: the table of virtual tokens of each text; (): none has one.
    structured_outputs: what the answers to each text obey; (): none obeys anything. add_special_tokens: let
    the tokenizer add them to the prompts. cut: reduce max_tokens if the prompt leaves less room; otherwise
    the request is refused. first_row: number of the first text among the client's. best: number of sequences
    of each text to return, those with the highest log probability; 0: all.
    """

    prompts: Sequence[Prompt]
    params: list[SamplingParams]
    stop_words: list[tuple[str, ...]]
    lora_names: list[str]
    priorities: list[int]
    streaming: bool
    exclude: bool
    show_stop: bool = False
    min_tokens: int = 0
    keep_last: int = 0
    skip_special: bool | None = None
    shown_tokens: tuple[str, ...] = ()
    log_probs: bool = False
    prompt_log_probs: int = -1
    tables: Sequence[RowPrompt | None] = ()
    structured_outputs: Sequence[StructuredOutput | None] = ()
    add_special_tokens: bool = True
    cut: bool = False
    names: FieldNames = FieldNames()
    first_row: int = 0
    best: int = 0

    def row_name(self, row: int) -> str:
        """Return the client's name of a text, for errors: with its number if there are several."""
        several = len(self.prompts) > 1 or self.first_row
        return f"{self.names.prompt} of row {self.first_row + row}" if several else self.names.prompt


def check_texts(asked: TextRequest, limits: TextLimits) -> int:
    """Return the bytes of a request's texts and token ids.

    Raises RequestError for texts that are too large.
    """
    total = 0
    for row, prompt in enumerate(asked.prompts):
        size = len(prompt.encode("utf-8")) if isinstance(prompt, str) else _ID_BYTES * len(prompt)
        limits.check_prompt(asked.row_name(row), size)
        total += size
    sizes = {words: sum(len(word.encode("utf-8")) for word in words) for words in set(asked.stop_words)}
    words_total = sum(sizes[words] for words in asked.stop_words)
    if sizes:
        most = max(map(len, sizes))
        limits.check_words(asked.names.stop_words, most, max(sizes.values()), words_total)
    limits.check_total(total + words_total)
    return total + words_total
