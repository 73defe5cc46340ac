"""Log probabilities of the engine's steps in OpenAI's two styles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tridecode.backend.front.fields.chat import ChatLogprobs, TokenLogprob, TopLogprob
from tridecode.backend.front.fields.completions import CompletionLogprobs
from tridecode.backend.service.prompt_scores import LOWEST
from tridecode.backend.text.token_texts import TextOffsets, TokenTexts
from tridecode.backend.wire.messages import TopLogProbs

Steps = Sequence[tuple[int, TopLogProbs]]


def completion_logprobs(
    steps: Steps, count: int, texts: TokenTexts, offsets: TextOffsets
) -> CompletionLogprobs:
    """count: number of most likely tokens. offsets: of the text, behind the earlier steps."""
    found = CompletionLogprobs([], [], [] if count else None, [])
    for token, top in steps:
        text = completion_label(texts, token)
        found.tokens.append(text)
        found.token_logprobs.append(max(top.log_prob, LOWEST))
        found.text_offset.append(offsets.next(token))
        if found.top_logprobs is not None:
            alternatives = by_text(_best(top, count), texts)
            alternatives.setdefault(text, max(top.log_prob, LOWEST))
            found.top_logprobs.append(alternatives)
    return found


def completion_label(texts: TokenTexts, token: int) -> str:
    """Return a token's text; its bytes where it is part of a character, as OpenAI's bytes:\\xe6\\xb8."""
    label = texts.label(token)
    return label if label == texts[token] else f"bytes:{label}"


def by_text(best: Iterable[tuple[int, float]], texts: TokenTexts) -> dict[str, float]:
    """Return text -> log probability, best first. Of tokens with one text the most likely one counts."""
    found: dict[str, float] = {}
    for token, log_prob in best:
        found.setdefault(completion_label(texts, token), log_prob)
    return found


def token_id_label(token: int) -> str:
    """Return a token's name by its id, as vLLM's return_tokens_as_token_ids."""
    return f"token_id:{token}"


def chat_logprobs(
    steps: Steps, count: int, texts: TokenTexts, label: Callable[[int], str] | None = None
) -> ChatLogprobs:
    """count: number of most likely tokens. label: name of a token; None: its text."""
    named = label or texts.label
    return ChatLogprobs(
        [
            TokenLogprob(
                named(token),
                max(top.log_prob, LOWEST),
                list(texts.bytes_of(token)),
                [
                    TopLogprob(named(other), log_prob, list(texts.bytes_of(other)))
                    for other, log_prob in _best(top, count)
                ],
            )
            for token, top in steps
        ]
    )


def _best(top: TopLogProbs, count: int) -> Iterator[tuple[int, float]]:
    for token, log_prob in zip(top.ids[:count], top.log_probs):
        yield token, max(log_prob, LOWEST)
