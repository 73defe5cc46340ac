"""Results of `LLM`, with the names of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Logprob:
    """One token among the most likely of a step. logprob: natural logarithm, by the model's own logits.

    rank: 1 for the most likely token; None where a service does not tell it. decoded_token: its text alone.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    token_ids: of the answer, with the token that ended it. cumulative_logprob, logprobs: only where
    SamplingParams.logprobs is set; one dict a token, id -> Logprob. finish_reason: "stop", "length", or None
    while it runs. stop_reason: the text of `stop` that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers to one prompt.

    prompt: None if token ids were given. outputs: samples, or beams, best first. embedding: (hidden_size,)
    float32, for pooling requests. prompt_logprobs: if SamplingParams requests them, one entry per prompt
    token: None for the first, then id -> Logprob, most likely first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    embedding: np.ndarray | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def keep_best(output: RequestOutput, n: int, shows: bool) -> None:
    """Keep the n answers with the highest log probability, best first. shows: keep their log
    probabilities."""
    likely = sorted(output.outputs, key=lambda answer: answer.cumulative_logprob or 0.0, reverse=True)
    output.outputs = likely[:n]
    for index, answer in enumerate(output.outputs):
        answer.index = index
        if not shows:
            answer.logprobs = answer.cumulative_logprob = None


@dataclass
class EmbeddingOutput:
    """embedding: (hidden_size,) float32."""

    embedding: np.ndarray


@dataclass
class EmbeddingRequestOutput:
    """The embedding of one prompt. prompt: None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
