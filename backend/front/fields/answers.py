"""Parts that answers have in common."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: found in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int = 0) -> Usage:
        """Return the usage of a request. cached: tokens of the prompts that the engine did not compute."""
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))
