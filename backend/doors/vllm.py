"""vLLM's contract at one door: text in, text out, sampling parameters as JSON. The rest is the text door's.

Where vLLM's backend and its engine leave room or are defective:

  Without `sampling_parameters` the request parameters are used, as with vLLM; with it they are ignored.
  An unknown or duplicate key is refused by name (vLLM answers with an internal error).
  presence_penalty and frequency_penalty count tokens of the answer, repetition_penalty also those of the
  prompt; a request with both kinds is refused. They apply before the temperature, as with vLLM. max_tokens is
  cut to the room that the prompt leaves, as with vLLM; a prompt without room is refused. Log probabilities
  are those of the model's own logits: vLLM's default, logprobs_mode "raw_logprobs".
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.vllm import KEYS_BY_NAME, VLLM
from tridecode.backend.doors.door import Received
from tridecode.backend.doors.door_settings import DoorSettings
from tridecode.backend.doors.requests import fields, sampling_json
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.doors.text import TensorAnswer, read_texts
from tridecode.backend.doors.text import TritonPythonModel as TextModel
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules, structured_fields
from tridecode.backend.service.prompt_scores import Alternatives, PromptScores, alternatives
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.text.completion import Completion, Piece
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.backend.wire.messages import Limits, SamplingParams, TopLogProbs
from tridecode.backend.wire.sampling_params import check

_NAMES = FieldNames(stop_words="stop", context_logits="prompt_logprobs")
_random = random.SystemRandom()


class TritonPythonModel(TextModel):
    contract = VLLM
    known_parameters = tuple(KEYS_BY_NAME)

    def prepare(self, settings: DoorSettings) -> None:
        super().prepare(settings)
        self.token_texts = TokenTexts(self.tokenizer.view)
        # created now rather than with the first request
        self.tokenizer.view_of(not settings.skip_special_tokens)

    def read(self, received: Received, limits: Limits) -> TextRequest:
        inputs = received.inputs
        streaming = self.streaming(inputs, "stream")
        texts = read_texts(inputs, limits)
        if len(texts) != 1:
            raise RequestError(f"text_input has {len(texts)} texts; wanted one")
        if streaming and not inputs.flag("exclude_input_in_output", True):
            raise RequestError("stream is true and exclude_input_in_output is false; a stream has no prompt")
        keys = self._keys(received)
        stop_words = tuple(dict.fromkeys(text for text in keys.get("stop", ()) if text))
        keep_last = keys.get("truncate_prompt_tokens", 0)
        field, output = structured_fields.read_fields(keys, "sampling_parameters: ")
        return TextRequest(
            prompts=texts,
            params=[self._params(keys, received, limits)],
            stop_words=[stop_words],
            lora_names=[keys.get("lora_name", "")],
            priorities=fields.priorities(inputs, received.parameters, 1),
            streaming=streaming,
            exclude=inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output),
            show_stop=keys.get("include_stop_str_in_output", False),
            min_tokens=keys.get("min_tokens", 0),
            keep_last=keep_last if keep_last >= 0 else limits.max_sequence_tokens - 1,
            skip_special=keys.get("skip_special_tokens"),
            log_probs="logprobs" in keys,
            prompt_log_probs=keys.get("prompt_logprobs", -1),
            best=_best(keys, streaming),
            cut=True,
            structured_outputs=[output],
            names=replace(_NAMES, structured_output=field),
            add_special_tokens=fields.add_special_tokens(inputs, self.settings.add_special_tokens),
        )

    def _keys(self, received: Received) -> dict[str, Any]:
        """Return the sampling parameters that were sent."""
        array = received.inputs.arrays.get("sampling_parameters")
        if array is None or array.size == 0:
            sent = {name: value for name, value in received.parameters.items() if name in KEYS_BY_NAME}
            return sampling_json.convert(sent, "request parameters")
        if array.size > 1:
            raise RequestError(f"sampling_parameters has {array.size} texts; wanted one")
        return sampling_json.parse(decode_text(array.reshape(-1)[0], "sampling_parameters"))

    def _params(self, keys: dict[str, Any], received: Received, limits: Limits) -> SamplingParams:
        sequences = keys.get("best_of", keys.get("n", 1))
        max_tokens = keys.get("max_tokens", 16)
        if keys.get("min_tokens", 0) > max_tokens:
            found = f"min_tokens is {keys['min_tokens']} and max_tokens is {max_tokens}"
            raise RequestError(f"{found}; wanted min_tokens of at most max_tokens")
        seed = keys.get("seed", -1)
        distribution = _distribution(keys, limits)
        if sequences > 1 and distribution["top_k"] == 1:
            name = "best_of" if "best_of" in keys else "n"
            found = f"{name} is {sequences} and the answer is greedy (temperature 0 or top_k 1)"
            raise RequestError(f"{found}; wanted {name} of 1")
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=keys.get("min_tokens", 0),
            num_return_sequences=sequences,
            **distribution,
            **sampling_rules.chosen_tokens(limits, keys.get("logit_bias"), keys.get("allowed_token_ids")),
            no_repeat_ngram_size=keys.get("no_repeat_ngram_size", 0),
            seed=_random.getrandbits(64) if seed == -1 else seed % 2**64,
            **self._ends(keys, limits),
            bad_words=self._bad_words(keys, received, limits),
            top_log_probs=_top_log_probs(keys, received),
            return_context_logits="prompt_logprobs" in keys,
            **_cache_use(keys),
        )
        complaint = check(params)
        if complaint:
            raise RequestError(f"sampling_parameters: {complaint}")
        return params

    def _ends(self, keys: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Return the model's end tokens and the request's stop_token_ids; min_tokens delays them all."""
        mine = keys.get("stop_token_ids", [])
        wrong = [token for token in mine if token >= limits.vocab_size]
        if wrong:
            raise RequestError(f"stop_token_ids has {wrong[0]}; wanted token ids below {limits.vocab_size}")
        request_limits.check_word_tokens("stop_token_ids", [mine], limits.max_stop_word_tokens)
        model = [] if keys.get("ignore_eos") else self.texts.end_ids(limits)
        return sampling_rules.all_ends([*model, *mine], keys.get("min_tokens", 0))

    def _bad_words(self, keys: dict[str, Any], received: Received, limits: Limits) -> list[list[int]]:
        words = tuple(dict.fromkeys(text for text in keys.get("bad_words", ()) if text))
        most = received.envelope.max_words
        if len(words) > most:
            raise RequestError(f"bad_words has {len(words):,} words; this model accepts {most:,}")
        ids = self.texts.bad_word_ids([words])[0]
        request_limits.check_word_tokens("bad_words", ids, limits.max_bad_word_tokens)
        return ids

    def answer(self, rows: list[Completion], received: Received, asked: TextRequest) -> VllmAnswer:
        return VllmAnswer(rows, received, self.settings, asked, self.token_texts, self.limits())


def _best(keys: dict[str, Any], streaming: bool) -> int:
    """Return TextRequest.best. Raises RequestError for a best_of below n, or above it with a stream."""
    n = keys.get("n", 1)
    best_of = keys.get("best_of", n)
    if best_of < n:
        raise RequestError(f"best_of is {best_of} and n is {n}; wanted best_of of n or more")
    if best_of > n and streaming:
        found = f"best_of is {best_of}, n is {n} and stream is true"
        raise RequestError(f"{found}; best_of chooses among whole answers: wanted no stream with it")
    return n if best_of > n else 0


def _distribution(keys: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return the parameters of the distribution by our names; vLLM's defaults draw from all tokens."""
    return sampling_rules.drawn(
        limits,
        temperature=keys.get("temperature", 1.0),
        top_k=keys.get("top_k", -1),
        top_p=keys.get("top_p", 1.0),
        min_p=keys.get("min_p", 0.0),
        typical_p=keys.get("typical_p", 1.0),
        repetition_penalty=keys.get("repetition_penalty", 1.0),
        presence_penalty=keys.get("presence_penalty", 0.0),
        frequency_penalty=keys.get("frequency_penalty", 0.0),
    )


def _cache_use(keys: dict[str, Any]) -> dict[str, Any]:
    """Return SamplingParams.cache, .cache_salt and .speculate."""
    use = keys.get("cache", "on")
    if use == "on" and keys.get("skip_reading_prefix_cache"):
        use = "write"
    speculate = keys.get("speculate", True)
    return {"cache": use, "cache_salt": keys.get("cache_salt", ""), "speculate": speculate}


def _top_log_probs(keys: dict[str, Any], received: Received) -> int:
    """Return SamplingParams.top_log_probs: -1 unless an output needs them."""
    inputs = received.inputs
    if inputs.flag("return_logprobs") and "logprobs" in keys:
        return keys["logprobs"]
    chooses = keys.get("best_of", 1) > keys.get("n", 1)
    return 0 if chooses or inputs.flag("return_cumulative_logprob") else -1


# ---------------------------------------------------------------- answering

_OPTIONAL = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


class VllmAnswer(TensorAnswer):
    """Output tensors [rows], one row per sequence of the prompt; each response has all rows."""

    def __init__(
        self,
        rows: list[Completion],
        received: Received,
        settings: DoorSettings,
        asked: TextRequest,
        token_texts: TokenTexts,
        limits: Limits,
    ):
        super().__init__(rows, received, settings, asked.streaming, together=True)
        self._wanted = {name for name in _OPTIONAL if received.inputs.flag(f"return_{name}")}
        self._has_log_probs = asked.log_probs
        self._cumulative = [0.0] * len(rows)
        self._token_texts = token_texts
        self._best = asked.best or len(rows)
        self._scores: PromptScores | None = None  # until they are sent
        if asked.prompt_log_probs >= 0:
            ids = rows[0].prompt or [limits.start_id]
            self._scores = PromptScores(ids, asked.prompt_log_probs, limits.vocab_size)

    def _tensors(self, pieces: dict[int, Piece]) -> list:
        for row, piece in pieces.items():
            self._cumulative[row] += sum(top.log_prob for _, top in piece.tops)
        scores = self._prompt_log_probs(pieces)
        if self._best < len(pieces):
            best = sorted(pieces, key=lambda row: -self._cumulative[row])[: self._best]
            pieces = {row: pieces[row] for row in best}
        rows = list(pieces.values())
        columns = {
            "finish_reason": [(piece.finish_reason or "None").encode() for piece in rows],
            "cumulative_logprob": [self._cumulative[row] for row in pieces],
            "num_input_tokens": [rows[0].num_prompt_tokens],
            "num_output_tokens": [piece.num_tokens for piece in rows],
        }
        if "logprobs" in self._wanted:
            columns["logprobs"] = [self._log_probs(piece).encode() for piece in rows]
        arrays: dict[str, Any] = {}
        if len(rows) == 1:
            tensors = self._outputs.text("text_output", rows[0].text.encode("utf-8"))
        else:
            tensors = self._outputs.tensors({"text_output": [piece.text.encode("utf-8") for piece in rows]})
        arrays.update((name, column) for name, column in columns.items() if name in self._wanted)
        arrays.update(scores)
        return tensors + self._outputs.tensors(arrays)

    def _prompt_log_probs(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """Return the output prompt_logprobs with the first response that has all of them; else {}."""
        scores = self._scores
        if scores is None:
            return {}
        if 0 in pieces:  # the prompt's logits come with its first sequence
            for _, extra in pieces[0].extras:
                scores.add(extra.context_logits)
        if not scores.complete:
            return {}
        self._scores = None
        found = scores.alternatives(self._token_texts, scores.count)
        return {"prompt_logprobs": [json.dumps(found).encode()]}

    def _log_probs(self, piece: Piece) -> str:
        """Return JSON: for each new token an object keyed by token id, the chosen token first."""
        if not self._has_log_probs:
            return "null"
        return json.dumps([self._alternatives(token, top) for token, top in piece.tops])

    def _alternatives(self, token: int, top: TopLogProbs) -> Alternatives:
        best = zip(top.ids, top.log_probs)
        return alternatives(token, top.log_prob, top.rank, best, self._token_texts)
