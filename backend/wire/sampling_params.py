"""The sampling parameters: one row each, and nothing else repeats a row.

A row is a field of SamplingParams: type, neutral value, meaning and range. The rows define the message that
carries them, the range check of doors and engine, the input tensors of a contract that has no name of its own
for a parameter (`doors/contracts`), the options of `tridecode generate` and a table in
docs/reference/requests.md. The per-slot struct of the kernels has columns of the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import msgspec


@dataclass(frozen=True)
class Range:
    """Values from low to high, both included; wanted: the same in words, for errors and documentation."""

    low: float
    high: float
    wanted: str


#: tokens of a step; vLLM's default limit
MAX_TOP_LOG_PROBS = 20
#: a lower temperature counts as 0, as in vLLM: dividing logits by it could overflow float32
GREEDY_BELOW = 1e-5
_ABOVE_0 = math.ulp(0.0)
_COUNT = Range(0, 2**31 - 1, "0 to 2**31 - 1")  # the engine stores it as int32
_TOP_K = Range(0, 2**31 - 1, "0 (the whole vocabulary) to 2**31 - 1")
_SEED = Range(0, 2**64 - 1, "0 to 2**64 - 1")
_SHARE = Range(0.0, 1.0, "a number from 0 (off) to 1")
_FRACTION = Range(_ABOVE_0, 1.0, "a number in (0, 1]")
#: smaller factors could make a logit infinite; slightly below 1e-6, because 1e-6 in FP32 is 9.9999999e-07
_FACTOR = Range(9.9999e-7, 1e6, "a number from 1e-6 to 1e6")
_DIVISOR = Range(0.0, 1e6, "a number from 0 to 1e6")
_PENALTY = Range(-1e6, 1e6, "a number from -1e6 to 1e6")
#: values of `pooling`: the hidden state of the last token of the prompt, or the mean over its tokens
POOLINGS = ("last", "mean")
MAX_BEAMS = 64
#: tokens that may end a sequence; csrc/sampling_state.h has as many columns
MAX_END_IDS = 16
#: values of `cache`
CACHE_USES = ("on", "write", "off")
MAX_SALT_BYTES = 256
_BEAMS = Range(1, MAX_BEAMS, f"1 to {MAX_BEAMS}")
_RETURNED = Range(0, MAX_BEAMS, f"0 (every beam, else 1) to {MAX_BEAMS}")
#: longest n-gram of `no_repeat_ngram_size`
MAX_NGRAM = 64
_NGRAM = Range(0, MAX_NGRAM, f"0 (off) to {MAX_NGRAM}")
#: token ids of `logit_bias`; kernels/sampling_state.py has as many columns
MAX_BIASES = 1024
#: a larger bias has the same effect, and logits stay finite
MAX_BIAS = 1e9
#: OpenAI's and vLLM's limit
MOST_BIAS = 100.0
_EXPONENT = Range(-16.0, 16.0, "a number from -16 to 16")
_EARLY_STOPPING = Range(0, 2, "0 (by a heuristic), 1 (as soon as all are found) or 2 (never)")


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of one sequence. All doors use these names; `check` compares values with the
    ranges.

    The order of operations is FasterTransformer's: biases, allowed ids, bad words and n-grams, temperature,
    repetition / presence / frequency penalty, min_tokens, min-p, top-k, top-p within what min-p and top-k
    left, then typical-p within what top-p left. `top_k == 1` or a temperature below GREEDY_BELOW is greedy.
    Biases are added to the model's own logits, as in vLLM and TensorRT-LLM. min-p goes before top-k and top-p
    as in vLLM; in transformers it comes after them. Both orders keep the same tokens unless top_p is below 1:
    min-p and top-k are bounds on the logits and commute. typical-p comes last, as in transformers.

    beam_width above 1 selects beam search (beams.py), in which top_k, top_p, min_p, typical_p and seed have
    no effect. Otherwise num_return_sequences is the number of sequences sampled from one prompt; sample i
    equals the answer of a request with the seed plus i, modulo 2**64.
    """

    max_tokens: Annotated[int, "maximum number of new tokens", _COUNT] = 16
    min_tokens: Annotated[int, "number of new tokens before which end tokens are impossible", _COUNT] = 0
    temperature: Annotated[float, "softmax temperature; below 1e-5: greedy", _DIVISOR] = 1.0
    top_k: Annotated[int, "sample from the k most likely tokens; 0: from all", _TOP_K] = 1
    top_p: Annotated[float, "nucleus (top-p) probability mass; 1 keeps all tokens", _FRACTION] = 1.0
    min_p: Annotated[float, "drop tokens below this share of the largest probability; 0: none", _SHARE] = 0.0
    typical_p: Annotated[
        float,
        "keep the tokens with the most typical information content, of this total probability; 1: all",
        _FRACTION,
    ] = 1.0
    top_p_decay: Annotated[
        float, "`top_p` is multiplied by this after each token, without top-k", _FRACTION
    ] = 1.0
    top_p_min: Annotated[float, "lower bound of a decaying `top_p`", _FRACTION] = 1e-6
    top_p_reset_id: Annotated[int, "token that resets a decaying `top_p`; -1: none"] = -1
    repetition_penalty: Annotated[float, "above 1: tokens that have occurred become less likely", _FACTOR] = (
        1.0
    )
    presence_penalty: Annotated[
        float, "subtracted once from the logit of each token that has occurred", _PENALTY
    ] = 0.0
    frequency_penalty: Annotated[float, "subtracted from a token's logit per occurrence", _PENALTY] = 0.0
    no_repeat_ngram_size: Annotated[
        int, "no sequence of this many tokens occurs twice in prompt and answer; 0: off", _NGRAM
    ] = 0
    logit_bias: Annotated[dict[int, float], "added to the logit of each of these token ids"] = {}
    allowed_token_ids: Annotated[list[int], "the only token ids that are generated, end tokens included"] = []
    count_prompt: Annotated[bool, "the penalties count tokens of the prompt, too"] = True
    seed: Annotated[int, "the same seed gives the same answer", _SEED] = 0
    beam_width: Annotated[int, "beams of a beam search; 1: none", _BEAMS] = 1
    len_penalty: Annotated[float, "beams compare log probability / length ** this", _EXPONENT] = 0.0
    beam_search_diversity_rate: Annotated[
        float,
        "added to a candidate's score, times its rank within its beam modulo the number of beams",
        _PENALTY,
    ] = 0.0
    early_stopping: Annotated[int, "when a pool of found beams is final", _EARLY_STOPPING] = 1
    num_return_sequences: Annotated[int, "answers to one prompt: samples or best beams", _RETURNED] = 0
    beam_pool: Annotated[bool, "ended beams leave the beam for a pool, as in transformers"] = False
    end_id: Annotated[int, "token that ends the sequence and stays in the output; -1: none"] = -1
    more_end_ids: Annotated[list[int], "further tokens that end it as `end_id` does"] = []
    stop_words: Annotated[list[list[int]], "sequences of ids that end the output and stay in it"] = []
    bad_words: Annotated[list[list[int]], "sequences of ids that are never generated"] = []
    return_log_probs: Annotated[bool, "return the log probability of each new token"] = False
    top_log_probs: Annotated[int, "return the n most likely tokens of each step; -1: none"] = -1
    return_context_embedding: Annotated[
        bool, "return the last layer's output, before the final norm, summed over the prompt"
    ] = False
    pooling: Annotated[
        str, "return the hidden state after the final norm, of the prompt's `last` token or the `mean`"
    ] = ""
    return_context_logits: Annotated[bool, "return the logits at each token of the prompt"] = False
    return_generation_logits: Annotated[bool, "return the logits that each new token is chosen from"] = False
    return_context_log_prob: Annotated[bool, "return the log probability of the prompt"] = False
    return_perf_metrics: Annotated[bool, "return times and cache blocks of the sequence"] = False
    speculate: Annotated[
        bool, "several tokens per step, of drafts, where the engine has them (`speculation`)"
    ] = True
    draft_tokens: Annotated[
        list[int], "ids that the answer probably contains, a source of drafts; they do not change it"
    ] = []
    cache: Annotated[
        str, "prefix cache: on; write: compute the whole prompt; off: neither use nor fill it"
    ] = "on"
    cache_salt: Annotated[
        str, "only requests with the same salt share cached prefixes; 256 bytes at most"
    ] = ""

    @property
    def divisor(self) -> float:
        """Return the divisor of the logits before the softmax; 0.0: greedy, no division."""
        return 0.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end the sequence, and are impossible before min_tokens."""
        return [token for token in (self.end_id, *self.more_end_ids) if token >= 0]

    @property
    def only_pools(self) -> bool:
        """Return whether the pooled hidden state is all that is wanted, so that no token is sampled."""
        return bool(self.pooling) and self.max_tokens == 0

    @property
    def returns_logits(self) -> bool:
        """Return whether results are made of the logits of a step, besides its tokens."""
        return self.return_context_logits or self.return_generation_logits or self.return_context_log_prob

    @property
    def num_slots(self) -> int:
        """Batch slots of the prompt's group once all its sequences run."""
        return self.beam_width if self.beam_width > 1 else max(1, self.num_return_sequences)

    @property
    def num_sequences(self) -> int:
        """Sequences of the prompt's group in the engine's events. Beams that compete to the end are one
        sequence, whose events have the steps of all of them.
        """
        if self.beam_width == 1:
            return max(1, self.num_return_sequences)
        return (self.num_return_sequences or self.beam_width) if self.beam_pool else 1


@dataclass(frozen=True)
class Parameter:
    """One row. range: None if the check needs more than the value, as for a token id."""

    name: str
    type: type
    default: Any
    meaning: str
    range: Range | None


@cache
def parameters(table: type[SamplingParams] = SamplingParams) -> tuple[Parameter, ...]:
    """The rows of a table, in order."""
    hints = get_type_hints(table, include_extras=True)
    found = []
    for field in msgspec.structs.fields(table):
        kind, meaning, *limits = get_args(hints[field.name])
        found.append(Parameter(field.name, kind, field.default, meaning, limits[0] if limits else None))
    return tuple(found)


@cache
def _ranges(table: type[SamplingParams]) -> tuple[tuple[str, float, float, str], ...]:
    return tuple((p.name, p.range.low, p.range.high, p.range.wanted) for p in parameters(table) if p.range)


def check(params: SamplingParams) -> str | None:
    """Return None, or one sentence that names the field out of range, what was found and what was wanted."""
    for name, low, high, wanted in _ranges(type(params)):
        value = getattr(params, name)
        if not low <= value <= high:  # a NaN compares false, so it is refused too
            return f"{name} is {value}; wanted {wanted}"
    if len(params.end_ids) > MAX_END_IDS:
        return f"end_id and more_end_ids are {len(params.end_ids)} tokens; wanted {MAX_END_IDS} at most"
    if params.logit_bias and (complaint := _bias_fault(params.logit_bias)):
        return complaint
    if params.cache not in CACHE_USES:
        return f"cache is {params.cache[:40]!r}; wanted one of {', '.join(CACHE_USES)}"
    if (salt_bytes := len(params.cache_salt.encode("utf-8", "surrogatepass"))) > MAX_SALT_BYTES:
        return f"cache_salt has {salt_bytes:,} bytes; wanted {MAX_SALT_BYTES} at most"
    if params.num_return_sequences > params.beam_width > 1:
        found = f"num_return_sequences is {params.num_return_sequences}"
        return f"{found}; wanted at most beam_width, {params.beam_width}"
    return _pooling_fault(params) if params.pooling else None


def _bias_fault(biases: dict[int, float]) -> str | None:
    if len(biases) > MAX_BIASES:
        return f"logit_bias has {len(biases):,} token ids; wanted {MAX_BIASES:,} at most"
    for token, value in biases.items():
        if not -MAX_BIAS <= value <= MAX_BIAS:  # a NaN compares false
            return f"logit_bias of token id {token} is {value}; wanted a number from -1e9 to 1e9"
    return None


def _pooling_fault(params: SamplingParams) -> str | None:
    found = f"pooling is {params.pooling!r}"
    if params.pooling not in POOLINGS:
        return f"{found}; wanted {' or '.join(map(repr, POOLINGS))}, or '' for none"
    if params.num_slots > 1:
        return f"{found} and the prompt has {params.num_slots} beams or samples; wanted 1 with it"
    if params.return_context_embedding:
        return f"{found} and return_context_embedding is true; wanted one of them"
    return None
