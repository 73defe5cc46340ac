"""vLLM's backend: text in, text out, and the sampling parameters as one JSON object.

Source: src/model.py and src/utils/request.py of vllm_backend (its config is completed automatically:
decoupled, max_batch_size 0), and SamplingParams of vLLM for the keys of the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tridecode.backend.doors.contracts.field import (
    RESUME,
    Contract,
    Field,
    Output,
    refused,
    special_tokens_field,
)
from tridecode.backend.wire.sampling_params import MAX_BEAMS, MAX_NGRAM, MAX_TOP_LOG_PROBS, MOST_BIAS

_INPUTS = (
    Field("text_input", "STRING", "prompt; no chat template is applied", kind="prompt", required=True),
    refused("image", "STRING", dims=(-1,)),
    Field("stream", "BOOL", "send pieces of the answer as they are generated", "false"),
    Field("sampling_parameters", "STRING", "a JSON object, see below", "the request parameters"),
    Field(
        "exclude_input_in_output",
        "BOOL",
        "leave the prompt out of a whole answer; a stream never has it, and false is refused",
        "`config.pbtxt`'s",
    ),
    Field("return_finish_reason", "BOOL", "return `finish_reason`", "false"),
    Field("return_cumulative_logprob", "BOOL", "return `cumulative_logprob`", "false"),
    Field("return_logprobs", "BOOL", "return `logprobs`", "false"),
    Field("return_num_input_tokens", "BOOL", "return `num_input_tokens`", "false"),
    Field("return_num_output_tokens", "BOOL", "return `num_output_tokens`", "false"),
    refused("embedding_request", "STRING"),
    RESUME,
    special_tokens_field(),  # ours
)

_OUTPUTS = (
    Output("text_output", "STRING", (-1,), "text; one per sequence"),
    Output("finish_reason", "STRING", (-1,), "`stop`, `length` or `abort`; `None` while it is generated"),
    Output("cumulative_logprob", "FP32", (-1,), "sum of the log probabilities of the new tokens so far"),
    Output("logprobs", "STRING", (-1,), "JSON, see below; `null` without `logprobs`"),
    Output("prompt_logprobs", "STRING", (1,), "JSON, with the first response, if `prompt_logprobs` was sent"),
    Output("num_input_tokens", "UINT32", (1,), "tokens of the prompt"),
    Output("num_output_tokens", "UINT32", (-1,), "new tokens; in a stream, those of this response"),
)

VLLM = Contract(_INPUTS, _OUTPUTS, batched=False)


@dataclass(frozen=True)
class Key:
    """One key of the JSON object.

    kind: "int", "float", "bool", "text", "texts" (a text or a list of texts), "ids" (a list of integers),
    "biases" (an object of integers and numbers), "object" (of a form of its own) or "any" (only compared with
    `neutral`). low, high: both included. refused: values other than `neutral` are not implemented. A null
    counts as not sent.
    """

    name: str
    kind: str
    meaning: str
    default: str = ""
    low: float = 0
    high: float = 2**31 - 1
    wanted: str = ""
    refused: bool = False
    neutral: tuple[Any, ...] = ()

    @property
    def in_words(self) -> str:
        """Describe the accepted values, for errors."""
        if self.wanted or self.kind not in ("int", "float"):
            return self.wanted or _IN_WORDS[self.kind].format(int(self.high))
        if self.kind == "int":
            return f"a whole number from {int(self.low)} to {int(self.high)}"
        return f"a number from {self.low:g} to {self.high:g}"


_IN_WORDS = {
    "bool": "true or false",
    "text": "a text of at most {} characters",
    "texts": "a text or a list of texts",
    "ids": "a list of token ids",
    "biases": "a JSON object of token ids and numbers from -{0} to {0}",
}


def _refused(name: str, *neutral: Any) -> Key:
    return Key(name, "any", "", refused=True, neutral=(None, *neutral))


KEYS = (
    Key("n", "int", "number of answers, each with its own seed; above 1 only with sampling", "1", 1,
        MAX_BEAMS),
    Key("best_of", "int", "sample this many and return the `n` with the highest log probability; no stream",
        "`n`", 1, MAX_BEAMS),
    Key("temperature", "float", "softmax temperature; 0 is greedy, below 0.01 counts as 0.01", "1", 0, 1e6),
    Key("top_k", "int", "sample from the k most likely tokens; -1 or 0: from all", "-1", -1),
    Key("top_p", "float", "nucleus (top-p) probability mass", "1", 0, 1, "a number in (0, 1]"),
    Key("min_p", "float", "drop tokens below this share of the largest probability; 0: none", "0", 0, 1),
    Key("typical_p", "float", "keep the tokens with the most typical information content, of this total "
        "probability", "1", 0, 1, "a number in (0, 1]"),
    Key("no_repeat_ngram_size", "int", "no sequence of this many tokens occurs twice in prompt and answer",
        "0", 0, MAX_NGRAM),
    Key("logit_bias", "biases", "an object of token ids and the numbers that are added to their logits",
        "none", -MOST_BIAS, MOST_BIAS),
    Key("allowed_token_ids", "ids", "the only tokens that are generated, end tokens included", "all"),
    Key("repetition_penalty", "float", "above 1: tokens of prompt and answer become less likely", "1", 1e-6,
        1e4),
    Key("presence_penalty", "float", "subtracted from a logit if the answer has its token", "0", -2, 2),
    Key("frequency_penalty", "float", "subtracted per occurrence of the token in the answer", "0", -2, 2),
    Key("seed", "int", "the same seed gives the same answer; -1: drawn at random", "-1", -(2**63), 2**64 - 1),
    Key("max_tokens", "int", "maximum number of new tokens, cut to the room that the prompt leaves", "16", 1),
    Key("min_tokens", "int", "new tokens before which nothing but `max_tokens` ends the answer", "0"),
    Key("stop", "texts", "texts that end the answer", "none"),
    Key("stop_token_ids", "ids", "tokens that end the answer", "none"),
    Key("bad_words", "texts", "words that are never generated", "none"),
    Key("include_stop_str_in_output", "bool", "the answer shows what ended it", "false"),
    Key("ignore_eos", "bool", "end tokens do not end the answer", "false"),
    Key("skip_special_tokens", "bool", "leave special tokens out of the answer", "true"),
    Key("logprobs", "int", "alternatives per token in the output `logprobs`", "none", 0, MAX_TOP_LOG_PROBS),
    Key("prompt_logprobs", "int", "alternatives per token in the output `prompt_logprobs`", "none", 0,
        MAX_TOP_LOG_PROBS),
    Key("truncate_prompt_tokens", "int", "keep this many tokens of the end; -1: what fits", "all", -1),
    Key("lora_name", "text", "name of the LoRA adapter, see [adapters.md](../guides/adapters.md)",
        "the base model",
        high=128),
    Key("skip_reading_prefix_cache", "bool", "compute the whole prompt; it still fills the prefix cache",
        "false"),
    Key("cache", "text", "prefix cache; `write`: compute the whole prompt; `off`: neither use nor fill it",
        "on", high=8, wanted="on, write or off"),
    Key("cache_salt", "text", "only requests with the same salt share cached prefixes; 256 bytes at most",
        "none", high=4096, wanted="a text of at most 256 bytes"),
    Key("structured_outputs", "object",
        "one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`", "none",
        wanted="an object, or its JSON text"),
    Key("guided_decoding", "object", "the same, by its older name", "none",
        wanted="an object, or its JSON text"),
    Key("guided_json", "object", "a JSON schema that the answer follows", "none",
        wanted="an object, or its JSON text"),
    Key("guided_regex", "object", "a regular expression that matches the whole answer", "none",
        wanted="a text"),
    Key("guided_choice", "object", "the answer is one of these texts", "none", wanted="a list of texts"),
    Key("guided_grammar", "object", "a grammar that the answer follows, in Lark's notation or EBNF", "none",
        wanted="a text"),
    Key("speculate", "bool", "several tokens per step, of drafts, where the engine has them", "true"),
    _refused("detokenize", True),
    _refused("spaces_between_special_tokens", True),
    _refused("logits_processors", []),
    _refused("extra_args", {}),
    _refused("output_kind", 0),
    _refused("flat_logprobs", False),
    # older versions of SamplingParams
    _refused("use_beam_search", False),
    _refused("length_penalty", 1),
    _refused("early_stopping", False),
)  # fmt: skip
KEYS_BY_NAME = {key.name: key for key in KEYS}
