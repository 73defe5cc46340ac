"""Fields shared by completions and chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tridecode.backend.wire.sampling_params import MAX_BEAMS, MAX_NGRAM, MAX_TOP_LOG_PROBS

INT32_MAX = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
NgramSize = Annotated[int, Meta(ge=0, le=MAX_NGRAM)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=1e6)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Repetition = Annotated[float, Meta(ge=1e-6, le=1e6)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Texts = Annotated[str | list[str], Meta(description="a text or a list of texts")]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. include_usage: the last chunk has the token counts; continuous_usage_stats: every
    chunk has them. include_obfuscation: no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for text: OpenAI's, then ours, named like vLLM's if vLLM has them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] | None = None
    stop: Texts | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    top_k: TopK | None = None
    min_p: Share | None = None
    typical_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    no_repeat_ngram_size: NgramSize | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0)] | None = None
    request_id: str | None = None
    cache: Literal["on", "write", "off"] | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    speculate: bool | None = None

    # accepted without effect: see NO_EFFECT
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    spaces_between_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    guided_decoding_backend: Any = None
    # refused unless neutral: see REFUSED
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None


#: fields that are accepted and change nothing; the response header x-tridecode-no-effect names those sent
NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "spaces_between_special_tokens", "return_tokens_as_token_ids",
        "guided_decoding_backend", "verbosity", "reasoning_effort", "prediction",
    }
)  # fmt: skip

#: neutral values of each field, besides null; any other value is refused. The last one is a field of
#: Colossal-Inference's routes.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "forced_eos_token_id": (),
}
