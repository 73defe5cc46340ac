"""Parameters of `LLM`, with the names and defaults of vLLM's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgspec

from tridecode.backend.base.errors import RequestError
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.structured_fields import Output, read_structured_outputs
from tridecode.backend.service.text_service import TextService
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.sampling_params import MAX_TOP_LOG_PROBS, check
from tridecode.backend.wire.sampling_params import SamplingParams as EngineParams

_random = random.SystemRandom()
_OUR_NAMES = {"num_return_sequences": "n", "len_penalty": "length_penalty"}


@dataclass
class SamplingParams:
    """Parameters that shape an answer.

    temperature 0: greedy. top_k -1 or 0, top_p 1, min_p 0: sample from all tokens. n: answers per prompt.
    best_of: answers to draw; the n with the highest log probability are returned, best first; not
    for streams. max_tokens: None: as many as fit. logprobs: number of most likely tokens to return for
    each step, besides the sampled one. prompt_logprobs: the same for each token of the prompt. seed: the same
    seed gives the same answers; sample i has the seed plus i. stop: texts that end an answer, which omits
    them unless include_stop_str_in_output. truncate_prompt_tokens: number of last tokens of a prompt to keep.
    structured_outputs: the form of an answer, with one of vLLM's keys: json (a schema), json_object, regex,
    choice, grammar, structural_tag. priority: smaller is sooner. timeout_s: deadline of a request; 0: none
    but the engine's.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | str | None = None
    priority: int = 0
    timeout_s: float = 0.0

    @property
    def num_answers(self) -> int:
        """Return the number of answers to draw per prompt."""
        return self.n if self.best_of is None else self.best_of

    def output(self) -> Output:
        """Return the form of the answer. Raises RequestError and UnsupportedError with its field."""
        return read_structured_outputs("structured_outputs", self.structured_outputs)

    def stop_words(self) -> tuple[str, ...]:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(dict.fromkeys(word for word in words if word))

    def engine_params(self, texts: TextService, limits: Limits) -> EngineParams:
        """Return the engine's parameters. Raises RequestError with the name of a wrong field."""
        check_types(self)
        self.check_counts()
        count = limits.max_sequence_tokens if self.max_tokens is None else self.max_tokens
        tops = -1 if self.logprobs is None else self.logprobs
        return _checked(
            max_tokens=max(count, self.min_tokens) if self.max_tokens is None else count,
            min_tokens=self.min_tokens,
            num_return_sequences=self.num_answers,
            **sampling_rules.drawn(
                limits,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                typical_p=self.typical_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
            ),
            **sampling_rules.chosen_tokens(limits, self.logit_bias, self.allowed_token_ids),
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=_random.getrandbits(64) if self.seed is None else self.seed % 2**64,
            **sampling_rules.checked_ends(
                () if self.ignore_eos else texts.end_ids(limits),
                self.stop_token_ids or (),
                self.min_tokens,
                limits,
            ),
            bad_words=_bad_words(self.bad_words or (), texts, limits),
            top_log_probs=max(tops, 0) if self.num_answers > self.n else tops,
            return_log_probs=self.logprobs is not None,
            return_context_logits=self.prompt_logprobs is not None,
        )

    def check_counts(self) -> None:
        """Raise RequestError for best_of below n, and for prompt_logprobs out of range."""
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of is {self.best_of} and n is {self.n}; wanted best_of of n or more")
        if not 0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOG_PROBS:
            raise RequestError(f"prompt_logprobs is {self.prompt_logprobs}; wanted 0 to {MAX_TOP_LOG_PROBS}")


@dataclass
class BeamSearchParams:
    """A beam search, as transformers does it: ended beams compete at score / length ** length_penalty.

    max_tokens: None for as many as fit. early_stopping: as soon as beam_width texts have ended.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    timeout_s: float = 0.0

    # parameters of SamplingParams that a beam search does not have
    min_tokens: ClassVar[int] = 0
    logprobs: ClassVar[int | None] = None
    prompt_logprobs: ClassVar[int | None] = None
    include_stop_str_in_output: ClassVar[bool] = False
    truncate_prompt_tokens: ClassVar[int | None] = None

    def output(self) -> Output:
        return None

    def stop_words(self) -> tuple[str, ...]:
        return ()

    def engine_params(self, texts: TextService, limits: Limits) -> EngineParams:
        """Return the engine's parameters. Raises RequestError with the name of a wrong field."""
        check_types(self)
        count = limits.max_sequence_tokens if self.max_tokens is None else self.max_tokens
        return _checked(
            max_tokens=count,
            beam_width=self.beam_width,
            beam_pool=True,
            len_penalty=self.length_penalty,
            early_stopping=1 if self.early_stopping else 0,
            return_log_probs=True,
            **sampling_rules.all_ends(() if self.ignore_eos else texts.end_ids(limits), 0),
        )


@dataclass
class PoolingParams:
    """The vectors of `LLM.embed`.

    pooling: the hidden state after the final norm of the "last" token of a prompt, or the "mean" over its
    tokens. normalize: scale it to length 1.
    """

    pooling: str = "last"
    normalize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout_s: float = 0.0

    # parameters of SamplingParams that matter only to texts
    max_tokens: ClassVar[int | None] = 0
    min_tokens: ClassVar[int] = 0
    logprobs: ClassVar[int | None] = None
    prompt_logprobs: ClassVar[int | None] = None
    include_stop_str_in_output: ClassVar[bool] = False
    skip_special_tokens: ClassVar[bool] = True

    def output(self) -> Output:
        return None

    def stop_words(self) -> tuple[str, ...]:
        return ()

    def engine_params(self, texts: TextService, limits: Limits) -> EngineParams:
        """Return the engine's parameters. Raises RequestError with the name of a wrong field."""
        check_types(self)
        return _checked(max_tokens=0, pooling=self.pooling)


def _checked(**values: Any) -> EngineParams:
    params = EngineParams(**values)
    if not -1 <= params.top_log_probs <= MAX_TOP_LOG_PROBS:
        raise RequestError(f"logprobs is {params.top_log_probs}; wanted 0 to {MAX_TOP_LOG_PROBS}")
    if complaint := check(params):
        name, _, rest = complaint.partition(" ")
        raise RequestError(f"{_OUR_NAMES.get(name, name)} {rest}")
    if params.min_tokens > params.max_tokens:
        found = f"min_tokens is {params.min_tokens} and max_tokens is {params.max_tokens}"
        raise RequestError(f"{found}; wanted at most that")
    return params


def check_types(params: SamplingParams | BeamSearchParams | PoolingParams) -> None:
    """Raise RequestError for a field of another type, such as a text for a number."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    for name, value in values.items():
        if isinstance(value, tuple):
            values[name] = list(value)
    try:
        msgspec.convert(values, type(params), strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"{type(params).__name__}: {error}") from None


def _bad_words(words: Sequence[str], texts: TextService, limits: Limits) -> list[list[int]]:
    if len(words) > request_limits.MAX_WORDS:
        raise RequestError(f"bad_words has {len(words):,} words; wanted {request_limits.MAX_WORDS:,} at most")
    ids = texts.bad_word_ids([tuple(dict.fromkeys(word for word in words if word))])[0]
    request_limits.check_word_tokens("bad_words", ids, limits.max_bad_word_tokens)
    return ids
