"""Asks a running server the questions of a task of prompt learning, as FasterTransformer's
gpt_prompt_learning_squad_task_eval.py does: by the number of a task, or with a table in each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.backend.wire.prompt_learning import P_TUNING, PREFIX_PROMPT
from tridecode.tools.client.chat import find_tokenizer_dir
from tridecode.tools.client.generate import grpc_address
from tridecode.tools.client.triton_stream import tensor
from tridecode.tools.evaluate.prompt_tasks import Item, Score, read_items, score
from tridecode.tools.progress import counter


@dataclass(frozen=True)
class Learned:
    """Prompt-learning inputs of each row. task: its number; or table: (positions, n) float32, and kind, its
    type. start_id: the first of `positions` virtual ids before each prompt; None: the server places them."""

    task: int | None = None
    table: np.ndarray | None = None
    kind: int = P_TUNING
    start_id: int | None = None
    positions: int = 0

    def ids(self) -> list[int]:
        """The virtual ids before each prompt."""
        return [] if self.start_id is None else list(range(self.start_id, self.start_id + self.positions))

    def tensors(self, rows: int) -> dict[str, np.ndarray]:
        if self.task is not None:
            return {"prompt_learning_task_name_ids": np.full((rows, 1), self.task, np.uint32)}
        if self.table is None:
            return {}
        return {
            "request_prompt_embedding": np.repeat(self.table[None].astype(np.float16), rows, axis=0),
            "request_prompt_lengths": np.full((rows, 1), len(self.table), np.uint32),
            "request_prompt_type": np.full((rows, 1), self.kind, np.uint32),
        }


@dataclass(frozen=True)
class Answered:
    """A question, its answer, and the score."""

    item: Item
    answer: str
    score: Score


def read_table(path: Path, task: str | None) -> tuple[np.ndarray, int]:
    """(positions, n) float32 and the type, of a NeMo archive or a PEFT folder. task: of an archive with
    several. Raises CheckpointError, UnsupportedError or ConfigError."""
    from tridecode.backend.weights.lora import CONFIG_FILE
    from tridecode.converters.sources.nemo import open_prompts  # imports torch
    from tridecode.converters.sources.peft_prompts import open_peft_prompt

    found = [open_peft_prompt(path)] if (path / CONFIG_FILE).exists() else open_prompts(path)
    named = [table for table in found if task in (None, table.task)]
    if len(named) != 1 or named[0].read is None:
        names = ", ".join(table.task for table in found)
        raise ConfigError(f"{path} has the tables {names}; wanted one of them: --table-task")
    return named[0].read().float().numpy(), named[0].kind


def evaluate_prompts(
    data: Path,
    learned: Learned,
    *,
    url: str = "localhost:8001",
    model: str = "fastertransformer",
    template: str,
    tokenizer: Path | None = None,
    batch: int = 1,
    max_output_len: int = 10,
    limit: int | None = None,
    timeout_s: float | None = None,
) -> list[Answered]:
    """Every question, in order, with its answer. batch: rows of a request.

    Raises ConfigError for the data or the tokenizer, EngineDownError where no server answers, TridecodeError
    with the server's text for a request that fails.
    """
    items = read_items(data, template, limit)
    url = grpc_address(url)
    split = Tokenizer.from_file(str(find_tokenizer_dir(tokenizer, url) / "tokenizer.json"))
    split.no_truncation()
    answered: list[Answered] = []
    client = triton.InferenceServerClient(url)
    try:
        with counter(f"{model} answers", len(items)) as progress:
            for first in range(0, len(items), batch):
                rows = items[first : first + batch]
                for item, text in zip(
                    rows, _ask(client, model, split, rows, learned, max_output_len, timeout_s)
                ):
                    answered.append(Answered(item, text, score(text, item.answers)))
                progress(len(answered))
    except InferenceServerException as error:
        text = f"{model} at {url}: {error.message()}"
        gone = error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
        raise (EngineDownError if gone else TridecodeError)(text) from None
    finally:
        client.close()
    return answered


def _ask(
    client: Any,
    model: str,
    split: Tokenizer,
    rows: Sequence[Item],
    learned: Learned,
    max_output_len: int,
    timeout_s: float | None,
) -> list[str]:
    """The text after each prompt, up to the model's end or a line's."""
    before = learned.ids()
    prompts = [before + split.encode(item.prompt, add_special_tokens=False).ids for item in rows]
    ids = np.zeros((len(rows), max(map(len, prompts))), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    arrays = {
        "input_ids": ids,
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.uint32),
        "request_output_len": np.full((len(rows), 1), max_output_len, np.uint32),
        "runtime_top_k": np.full((len(rows), 1), 1, np.uint32),
        "beam_width": np.full((len(rows), 1), 1, np.uint32),
        "is_return_log_probs": np.full((len(rows), 1), True),
        **learned.tensors(len(rows)),
    }
    inputs = [tensor(name, array) for name, array in arrays.items()]
    result = client.infer(model, inputs, client_timeout=timeout_s)
    found, ends = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    starts = result.as_numpy("response_input_lengths")
    texts = [
        split.decode(found[row, 0, starts[row, 0] : ends[row, 0]].tolist(), skip_special_tokens=True)
        for row in range(len(rows))
    ]
    return [text.strip().split("\n")[0] for text in texts]


def summary(answered: Sequence[Answered]) -> dict[str, Any]:
    """The scores in percent, and every answer, for JSON."""
    count = len(answered)
    return {
        "questions": count,
        "exact": 100 * sum(one.score.exact for one in answered) / count,
        "f1": 100 * sum(one.score.f1 for one in answered) / count,
        "answers": [
            {"line": one.item.number + 1, "answer": one.answer, "exact": one.score.exact, "f1": one.score.f1}
            for one in answered
        ],
    }


def learned_of(
    task: int | None, table: Path | None, table_task: str | None, start_id: int | None, positions: int | None
) -> Learned:
    """Return the prompt-learning inputs that the command's options select. Raises ConfigError for options
    that exclude each other."""
    if task is not None and table is not None:
        raise ConfigError("--task and --table were given; wanted one of them, or neither for the bare model")
    if start_id is not None and table is None and not (task is not None and positions):
        raise ConfigError(
            "--start-id wants --table, or --task with --positions, the length of the task's table"
        )
    if table is None:
        return Learned(task=task, start_id=start_id, positions=positions or 0)
    values, kind = read_table(table, table_task)
    if kind == PREFIX_PROMPT and start_id is not None:
        raise ConfigError(f"{table} is a prefix, which has no virtual ids; leave --start-id out")
    return Learned(table=values, kind=kind, start_id=start_id, positions=len(values))
