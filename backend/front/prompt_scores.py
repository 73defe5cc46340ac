"""Log probabilities of a prompt's own tokens, as answers show them."""

from __future__ import annotations

from dataclasses import replace

from tridecode.backend.front.errors import bad_request
from tridecode.backend.front.fields.completions import CompletionLogprobs
from tridecode.backend.front.fields.sampling import Sampled
from tridecode.backend.front.logprobs import by_text, completion_label
from tridecode.backend.front.model import ServedModel
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.service.text_request import TextRequest
from tridecode.backend.text.token_texts import TextOffsets, TokenTexts


def check_prompt_logprobs(wanted: Sampled) -> None:
    """Raise ApiError for prompt_logprobs with a stream, as vLLM does."""
    if wanted.prompt_logprobs is not None and wanted.stream:
        text = "prompt_logprobs is sent and stream is true; wanted one of them"
        raise bad_request(text, "prompt_logprobs")


async def with_ids(model: ServedModel, asked: TextRequest) -> TextRequest:
    """Return the request with token ids instead of texts, because the answer lists each token."""

    def tokenise() -> list[list[int]]:
        found = model.tokenizer.ids(asked.prompts, asked.add_special_tokens)
        return [ids[-asked.keep_last :] for ids in found]

    model.texts.check_texts(asked, model.limits())
    prompts = await model.run(True, tokenise)
    return replace(asked, prompts=prompts, keep_last=0)


def echoed_logprobs(scores: PromptScores, texts: TokenTexts, length: int, count: int) -> CompletionLogprobs:
    """Return the prompt's part of an answer that echoes it. texts: as the answer shows them. length: of the
    prompt's text, in characters, which lacks the space that some tokenizers put before the first word.
    count: number of most likely tokens at each position."""
    found = CompletionLogprobs([], [], [] if count else None, [])
    whole = TextOffsets(texts)
    for token in scores.ids:
        whole.next(token)
    offsets = TextOffsets(texts, length - whole.end)
    for token, log_prob, best in zip(scores.ids, scores.log_probs, scores.best):
        text = completion_label(texts, token)
        found.tokens.append(text)
        found.token_logprobs.append(log_prob)
        found.text_offset.append(max(0, offsets.next(token)))
        if found.top_logprobs is not None:
            alternatives = by_text(best[:count], texts)
            if log_prob is not None:
                alternatives.setdefault(text, log_prob)
            found.top_logprobs.append(alternatives if log_prob is not None else None)
    return found
