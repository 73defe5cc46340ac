"""Beam search by the book: whole texts, no cache, float64. The engine's beams are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tridecode.backend.wire.messages import BeamStep, SamplingParams


class Text(NamedTuple):
    tokens: list[int]
    log_probs: list[float]
    ended: bool = False

    @property
    def cum(self) -> float:
        return sum(self.log_probs)


#: the model: all tokens so far -> (V,) logits
Model = Callable[[list[int]], np.ndarray]


def log_probs_of(model: Model, prompt: list[int], tokens: list[int], params: SamplingParams) -> np.ndarray:
    """(V,) after temperature, penalties, min_tokens and bad words, one id after the other."""
    known = [*prompt, *tokens]
    x = np.array(model(known), np.float64) / (params.temperature or 1.0)
    for token in set(known):
        x[token] = (
            x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
        )
        x[token] -= params.presence_penalty + params.frequency_penalty * known.count(token)
    for word in params.bad_words:
        if known[len(known) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(tokens) < params.min_tokens:
        x[[token for token in (params.end_id, *params.more_end_ids) if token >= 0]] = -np.inf
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def ends(prompt: list[int], tokens: list[int], params: SamplingParams) -> bool:
    known = [*prompt, *tokens]
    stopped = any(known[-len(word) :] == word for word in params.stop_words)
    return tokens[-1] in (params.end_id, *params.more_end_ids) or stopped or len(tokens) == params.max_tokens


def candidates(
    model: Model, prompt: list[int], beams: list[Text], params: SamplingParams
) -> list[tuple[float, Text]]:
    """(bonus for diversity, text) of the best 2 * beam_width tokens of each beam; of an ended one, itself."""
    found = []
    for beam in beams:
        if beam.ended:
            found.append((0.0, beam))
            continue
        log_probs = log_probs_of(model, prompt, beam.tokens, params)
        for rank, token in enumerate(np.argsort(-log_probs)[: 2 * params.beam_width].tolist()):
            tokens = [*beam.tokens, token]
            text = Text(tokens, [*beam.log_probs, float(log_probs[token])], ends(prompt, tokens, params))
            found.append((params.beam_search_diversity_rate * (rank % params.beam_width), text))
    return [one for one in found if np.isfinite(one[1].cum)]


def competition(model: Model, prompt: list[int], params: SamplingParams) -> list[list[Text]]:
    """FasterTransformer's rule: the beams after every step, best first."""
    beams, history = [Text([], [])], []
    while not all(beam.ended for beam in beams):
        found = candidates(model, prompt, beams, params)

        def score(one: tuple[float, Text]) -> float:
            bonus, text = one
            return text.cum / (len(prompt) + len(text.tokens)) ** params.len_penalty + bonus

        beams = [text for _, text in sorted(found, key=score, reverse=True)[: params.beam_width]]
        history.append(beams)
    return history


def pool(model: Model, prompt: list[int], params: SamplingParams) -> list[Text]:
    """transformers' rule: the best ended texts."""
    beams, found_texts, width = [Text([], [])], [], params.beam_width

    def score(text: Text) -> float:
        return text.cum / len(text.tokens) ** params.len_penalty

    while True:
        found = candidates(model, prompt, beams, params)
        ordered = [text for bonus, text in sorted(found, key=lambda one: one[1].cum + one[0], reverse=True)]
        found_texts += [text for text in ordered[:width] if text.ended]
        found_texts = sorted(found_texts, key=score, reverse=True)[:width]
        beams = [text for text in ordered if not text.ended][:width]
        if not beams:
            return found_texts
        if len(found_texts) == width:
            longest = params.early_stopping == 2 and params.len_penalty > 0
            length = params.max_tokens if longest else len(beams[0].tokens)
            hopeless = beams[0].cum / length**params.len_penalty <= score(found_texts[-1])
            if params.early_stopping == 1 or hopeless:
                return found_texts


def followed(steps: list[BeamStep]) -> list[Text]:
    """The beams after these steps, by following parents back from the last one."""
    texts = []
    for beam in range(len(steps[-1].tokens)):
        text: list[tuple[int, float]] = []
        for step in reversed(steps):
            if step.tokens[beam] >= 0:
                text.append((step.tokens[beam], step.log_probs[beam]))
            beam = step.parents[beam]
        texts.append(Text([token for token, _ in text[::-1]], [value for _, value in text[::-1]]))
    return texts
