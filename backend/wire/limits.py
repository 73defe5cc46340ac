"""The limits of an engine, which it sends to each door."""

from __future__ import annotations

import msgspec

from tridecode.backend.wire.prompt_learning import PromptLimits
from tridecode.backend.wire.structured_output import MAX_GRAMMAR_BYTES


class Limits(msgspec.Struct, frozen=True):
    """The limits that a door checks before it sends a request."""

    vocab_size: int
    max_sequence_tokens: int  # prompt + new tokens
    max_sequences: int
    max_queued_requests: int
    max_bad_word_tokens: int
    max_stop_word_tokens: int
    start_id: int
    end_id: int
    model_name: str
    hidden_size: int = 0
    request_timeout_s: float = 3600.0  # deadline of a request without one
    prompts: PromptLimits = PromptLimits()
    max_logits_bytes: int = 256 << 20  # bytes of the logits that one request returns
    more_end_ids: list[int] = []  # further tokens that end a text, as end_id does
    max_grammar_bytes: int = MAX_GRAMMAR_BYTES  # bytes of the text of a StructuredOutput
    grammar_fault: str = ""  # why no answer can obey a grammar; "": it can
