"""Training texts: prompts from a file or sampled from the target, and the target's answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.progress import counter

#: maximum tokens of a sampled prompt
SEED_TOKENS = 24
#: top-k of sampled texts: one token from the tail derails a small model
_TOP_K = 50
_FEWEST_ANSWER_TOKENS = 8  # shorter answers are dropped
_MAX_FILE_BYTES = 256 << 20
_STEPS = 32  # interval between two reports of progress


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer. ids: int32 of both. prompt: number of tokens of the prompt."""

    ids: np.ndarray
    prompt: int


@dataclass(frozen=True)
class Texts:
    """train: texts to learn from. held_back: greedy answers to other prompts, for the evaluation."""

    train: list[Text]
    held_back: list[Text]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.train)


def read_prompts(path: Path, tokenizer: Path | None, config: ModelConfig, most: int) -> list[list[int]]:
    """Return the token ids of the prompts of a file, cut to their last `most` tokens.

    A .jsonl file has one JSON value a line: a string, an object with the string "prompt", or a list of token
    ids. Any other file has one prompt a line, as text. Raises ConfigError, which names the line.
    """
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} holds {size:,} bytes; wanted at most {_MAX_FILE_BYTES:,}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    encoder = None if tokenizer is None else Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        value = _value(line, where) if path.suffix == ".jsonl" else line
        if isinstance(value, str):
            if encoder is None:
                raise ConfigError(
                    f"{where} is text, and the model has no tokenizer; wanted lists of token ids"
                )
            value = encoder.encode(value).ids
        bad = [token for token in value if not 0 <= token < config.vocab_size]
        if bad or not value:
            found = f"token id {bad[0]}" if bad else "no token"
            raise ConfigError(f"{where} has {found}; wanted ids from 0 to {config.vocab_size - 1}")
        prompts.append(value[-most:])
    return prompts


def _value(line: str, where: str) -> str | list[int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    if isinstance(value, dict):
        value = value.get("prompt")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ConfigError(f'{where} has no prompt; wanted a string, {{"prompt": string}} or a list of token ids')


def draw_prompts(engine: OfflineEngine, count: int, seed: int) -> list[list[int]]:
    """Sample the first tokens of `count` texts from the target, at temperature 1 after its start token."""
    config = engine.model_config
    lengths = np.random.default_rng(seed).integers(4, SEED_TOKENS, count)
    params = [
        SamplingParams(max_tokens=int(length), top_k=_TOP_K, temperature=1.0, seed=seed + number, cache="off")
        for number, length in enumerate(lengths)
    ]
    start = [config.start_id if config.start_id >= 0 else 0]
    return [start + tokens for tokens in _answers(engine, [start] * count, params, "drawing prompts")]


def write_texts(
    engine: OfflineEngine,
    prompts: list[list[int]],
    held_back: int,
    answer_tokens: int,
    temperature: float,
    seed: int,
) -> Texts:
    """Let the target answer the prompts, every other one greedily, the others at `temperature`.

    held_back: number of prompts at the end that are answered greedily and not trained on. Raises ConfigError
    if all training answers or all held-back answers are too short.
    """
    config, last = engine.model_config, len(prompts) - held_back
    common: dict[str, Any] = {
        "max_tokens": answer_tokens,
        "end_id": config.end_id,
        "more_end_ids": [*config.more_end_ids],
    }
    greedy = SamplingParams(cache="off", **common)
    params = [
        greedy
        if number >= last or number % 2 == 0 or not temperature
        else SamplingParams(top_k=_TOP_K, temperature=temperature, seed=seed + number, cache="off", **common)
        for number in range(len(prompts))
    ]
    answers = _answers(engine, prompts, params, "writing texts")
    parts: tuple[list[Text], list[Text]] = ([], [])
    for number, (prompt, answer) in enumerate(zip(prompts, answers)):
        if len(answer) >= _FEWEST_ANSWER_TOKENS:
            parts[number >= last].append(Text(np.array(prompt + answer, np.int32), len(prompt)))
    for part, what in zip(parts, ("training", "held-back")):
        if not part:
            raise ConfigError(
                f"the model answers all {what} prompts with less than {_FEWEST_ANSWER_TOKENS} tokens; "
                "wanted other prompts (--prompts)"
            )
    return Texts(*parts)


@torch.inference_mode()
def _answers(
    engine: OfflineEngine, prompts: list[list[int]], params: list[SamplingParams], title: str
) -> list[list[int]]:
    numbers = [engine.submit(prompt, wanted) for prompt, wanted in zip(prompts, params)]
    with counter(title, len(numbers)) as show:
        while any(engine.step() for _ in range(_STEPS)):
            show(sum(bool(engine.generations[number].finish) for number in numbers))
    return [engine.generations[number].tokens for number in numbers]
