"""The meaning and the default of every field of a request; its type and range are those of the struct.

docs/reference/openai_fields.md (`python -m tridecode.tools.generated_docs.openai_fields --write`) and the
descriptions of the OpenAPI document are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tridecode.backend.front.fields.sampling import NO_EFFECT, REFUSED
from tridecode.backend.front.fields.schemas import SCHEMAS

_T = TypeVar("_T")


class Meaning(NamedTuple):
    """default: the value that an absent field stands for, as JSON, or words; "": nothing."""

    text: str
    default: str = ""


_REQUIRED = "required"
#: name of a field, or "STRUCT.FIELD" where a struct gives the name a meaning of its own
MEANINGS: dict[str, Meaning] = {
    # every request for text
    "model": Meaning("name of the model or of one of its adapters", "the model"),
    "stream": Meaning("send the answer as server-sent events while it is made", "false"),
    "stream_options": Meaning("what a stream also tells; no effect on whole answers", "{}"),
    "include_usage": Meaning("a last event before `[DONE]` has the numbers of tokens", "false"),
    "continuous_usage_stats": Meaning("every event has the numbers of tokens so far", "false"),
    "max_tokens": Meaning("most tokens of an answer", "16"),
    "temperature": Meaning("divides the logits; 0: greedy", "1"),
    "top_p": Meaning("sample from the most probable tokens with this share of the probability", "1"),
    "n": Meaning("answers to each prompt", "1"),
    "stop": Meaning("an answer ends before the first of these texts", "[]"),
    "seed": Meaning("of the random numbers; answer i has the seed plus i", "random"),
    "presence_penalty": Meaning("subtracted from the logits of tokens that the answer has", "0"),
    "frequency_penalty": Meaning("subtracted for each occurrence in the answer", "0"),
    "top_k": Meaning("sample from this many most probable tokens; -1 or 0: from all", "0"),
    "min_p": Meaning("least probability of a token, as a share of the highest one", "0"),
    "typical_p": Meaning(
        "sample from the tokens with the most typical information content, of this total probability", "1"
    ),
    "no_repeat_ngram_size": Meaning(
        "no sequence of this many tokens occurs twice in prompt and answer; 0: off", "0"
    ),
    "logit_bias": Meaning("added to the logits: token ids and numbers from -100 to 100, 1,024 at most", "{}"),
    "allowed_token_ids": Meaning("the only tokens of the answer, end tokens included", "all"),
    "repetition_penalty": Meaning("divides the positive logits of tokens of prompt and answer", "1"),
    "min_tokens": Meaning("no end token and no stop text before this many tokens", "0"),
    "stop_token_ids": Meaning("further end tokens", "[]"),
    "ignore_eos": Meaning("the model's end tokens do not end the answer", "false"),
    "include_stop_str_in_output": Meaning("the answer keeps the stop text that ended it", "false"),
    "skip_special_tokens": Meaning("special tokens have no text", "`skip_special_tokens` of the repository"),
    "bad_words": Meaning("texts whose last token is never sampled after the ones before it", "[]"),
    "truncate_prompt_tokens": Meaning(
        "keep this many last tokens of the prompt; -1: as many as the model takes; 0: all", "0"
    ),
    "add_special_tokens": Meaning(
        "the tokenizer adds its special tokens to a text", "`add_special_tokens` of the repository"
    ),
    "priority": Meaning("order among waiting requests; smaller is sooner", "0"),
    "timeout_s": Meaning("deadline in seconds, after which the request ends with 504", "none"),
    "return_text": Meaning("choices also have their `text` and `stop_reason`", "false"),
    "request_id": Meaning("name of the request in the log, and the header `x-request-id`", "a new one"),
    "cache": Meaning("prefix cache; write: compute the whole prompt; off: neither use nor fill it", '"on"'),
    "cache_salt": Meaning("only requests with the same salt share cached prefixes; 256 bytes at most", '""'),
    "skip_reading_prefix_cache": Meaning("as `cache` with the value write", "false"),
    "response_format": Meaning(
        "type `text`; `json_object`: any JSON object; `json_schema`; or `structural_tag`", '{"type": "text"}'
    ),
    "structured_outputs": Meaning(
        "one of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`; also as JSON text",
        "none",
    ),
    "guided_json": Meaning("a JSON schema that the answer follows", "none"),
    "guided_regex": Meaning("a regular expression that matches the whole answer", "none"),
    "guided_choice": Meaning("the answer is one of these texts", "none"),
    "guided_grammar": Meaning("a grammar that the answer follows, in Lark's notation or EBNF", "none"),
    "structural_tag": Meaning("`structures` and `triggers`: text with parts that follow a schema", "none"),
    "prompt_logprobs": Meaning(
        "log probabilities of the prompt's tokens, and this many alternatives of each; no stream", "none"
    ),
    "speculate": Meaning("several tokens per step, of drafts, where the engine has them", "true"),
    # completions
    "prompt": Meaning("a text, a list of texts, token ids, or a list of lists of token ids", _REQUIRED),
    "CompletionRequest.logprobs": Meaning(
        "log probabilities of the answer's tokens, and this many alternatives of each", "none"
    ),
    "echo": Meaning("the answer begins with its prompt, which `logprobs` then scores, too", "false"),
    "best_of": Meaning(
        "sample this many and return the `n` with the highest log probability per token; no stream", "`n`"
    ),
    # embeddings
    "input": Meaning("a text, a list of texts, token ids, or a list of lists; 2,048 at most", _REQUIRED),
    "encoding_format": Meaning("`float`, or `base64` of little-endian float32", '"float"'),
    "dimensions": Meaning("numbers of a vector; only the model's own", "the model's hidden size"),
    "pooling": Meaning("hidden state of the `last` token, or the `mean` over the tokens", '"last"'),
    "normalize": Meaning("scale each vector to length 1", "true"),
    "EmbeddingRequest.truncate_prompt_tokens": Meaning(
        "keep this many last tokens of each input; -1: as many as the model takes; 0: all", "0"
    ),
    # chats
    "messages": Meaning("the chat so far", _REQUIRED),
    "ChatRequest.max_tokens": Meaning("as `max_completion_tokens`", "the room that is left"),
    "max_completion_tokens": Meaning("most tokens of an answer", "the room that is left"),
    "ChatRequest.add_special_tokens": Meaning("the tokenizer adds its special tokens to the chat", "false"),
    "ChatRequest.logprobs": Meaning("log probabilities of the answer's tokens", "false"),
    "top_logprobs": Meaning("alternatives of each token; wants `logprobs`", "0"),
    "add_generation_prompt": Meaning("the prompt ends with the beginning of an answer", "true"),
    "chat_template_kwargs": Meaning("further variables of the template", "{}"),
    "documents": Meaning("the template's variable `documents`", "none"),
    "continue_final_message": Meaning("the answer continues the text of the last message", "false"),
    "tools": Meaning("functions that the model may call, 128 at most", "[]"),
    "tool_choice": Meaning('"none", "auto", "required", or a function that the answer has to call', '"auto"'),
    "parallel_tool_calls": Meaning("an answer may have several calls", "true"),
    # messages
    "role": Meaning("system (or developer), user, assistant or tool; the template decides", _REQUIRED),
    "content": Meaning("a text, or parts of the type `text`; null if there are tool calls", "null"),
    "name": Meaning("the template's variable `name` of the message", "none"),
    "tool_calls": Meaning("the calls of an earlier answer, as they came", "[]"),
    "tool_call_id": Meaning("of the role tool: the call whose result this is", "none"),
    "reasoning_content": Meaning("the template's variable `reasoning_content` of the message", "none"),
    "type": Meaning("`text`, or `refusal` in an earlier answer", _REQUIRED),
    "text": Meaning("text of a part of type `text`", "none"),
    # token ids
    "token_ids": Meaning("the prompt", _REQUIRED),
    "sampling_params": Meaning("the fields of a completion, without its prompt and `best_of`", "{}"),
    # texts and tokens
    "TokenizeRequest.prompt": Meaning("a text; else `messages`", "none"),
    "TokenizeRequest.messages": Meaning("a chat, rendered with the fields that chats have, too", "none"),
    "TokenizeRequest.add_special_tokens": Meaning(
        "the tokenizer adds its special tokens", "`add_special_tokens` of the repository; false for a chat"
    ),
    "return_token_strs": Meaning("the answer also has each token's text", "false"),
    "tokens": Meaning("token ids", _REQUIRED),
    "DetokenizeRequest.skip_special_tokens": Meaning("special tokens have no text", "false"),
    # Colossal-Inference's routes
    "GenerateFields.prompt": Meaning("a text", _REQUIRED),
    "ColossalFields.stream": Meaning("JSON objects with a zero byte behind each; the text so far", "false"),
    "max_new_tokens": Meaning("most tokens of an answer", "256"),
    "ColossalFields.max_tokens": Meaning("as `max_new_tokens`, which it replaces", "256"),
    "do_sample": Meaning("false: greedy, whatever the other fields say", "false"),
    # adapters
    "lora_name": Meaning("name that requests use as their `model`", _REQUIRED),
    "lora_path": Meaning("a folder of the server in PEFT's layout, with safetensors", _REQUIRED),
    "load_inplace": Meaning("replace an adapter of this name", "false"),
}


def meaning_of(struct: type[msgspec.Struct], field: str) -> Meaning | None:
    """Return the meaning of a struct's field; None: the field is refused or has no effect."""
    return _own(MEANINGS, struct, field) or MEANINGS.get(field)


def _own(table: Mapping[str, _T], struct: type[msgspec.Struct], field: str) -> _T | None:
    """Return the value of the struct's own entry, or of that of a struct it is made from."""
    names = (f"{kind.__name__}.{field}" for kind in struct.__mro__)
    return next((table[name] for name in names if name in table), None)


def described(schema: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a struct's JSON schema with its fields' meanings, and the values of those that are refused."""
    properties = dict(schema["properties"])
    for name in properties:
        value = _own(SCHEMAS, struct, name) or properties[name]
        properties[name] = value
        if found := meaning_of(struct, name):
            default = f" (default: {found.default})" if found.default not in ("", _REQUIRED) else ""
            properties[name] = {**value, "description": found.text + default}
        elif name in NO_EFFECT:
            properties[name] = {**value, "description": "accepted without effect"}
        elif name in REFUSED and value.keys() <= {"default"}:
            properties[name] = {"enum": [None, *REFUSED[name]], "description": "the feature is not there"}
    return {**schema, "properties": properties}
