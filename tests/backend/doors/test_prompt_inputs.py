"""Prompt learning at the doors: tasks, tables of requests, virtual ids, and every value that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.backend.doors.test_fastertransformer import ask, config, tensors
from tests.backend.doors.test_text import INPUTS as TEXT_INPUTS
from tests.backend.doors.test_text import OUTPUTS as TEXT_OUTPUTS
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine, scripted, toy_tokens
from tridecode.backend.doors.fastertransformer import TritonPythonModel
from tridecode.backend.doors.text import TritonPythonModel as TextModel
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.prompt_learning import PromptLimits, PromptTask

V, C = LIMITS.vocab_size, LIMITS.hidden_size  # 1000, 4
START = 990  # ten padding ids of the vocabulary are virtual
TASKS = [PromptTask("mood", 3, 3), PromptTask("news", 2, 2), PromptTask("lost", 5, 3, "its file is missing")]
PROMPTS = PromptLimits(3, START, TASKS, prefix_size=8, largest=65504.0)


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    engine = FakeEngine(limits=msgspec.structs.replace(LIMITS, prompts=PROMPTS))
    with running(TritonPythonModel, config(), engine) as door:
        yield door


@pytest.fixture(scope="module")
def plain_door() -> Iterator[Any]:
    with running(TritonPythonModel, config(), FakeEngine()) as door:
        yield door


def table(*lengths: int, width: int = C, dtype=np.float16) -> np.ndarray:
    """(rows, longest, width): value row + position / 8, and NaN where a row has no position."""
    values = np.full((len(lengths), max(lengths), width), np.nan, dtype)
    for row, length in enumerate(lengths):
        values[row, :length] = row + np.arange(length)[:, None] / 8
    return values


def request_table(lengths: list[int], kinds, **options) -> dict[str, Any]:
    return {
        "request_prompt_embedding": table(*lengths, **options),
        "request_prompt_lengths": lengths,
        "request_prompt_type": kinds,
    }


def sent(door) -> list:
    return door.test_engine.submits[-1].sequences


def answer(prompt: list[int], count: int) -> list[int]:
    return toy_tokens(prompt, count, SamplingParams(max_tokens=count, top_k=1), V)


def ids(sequence) -> list[int]:
    return np.frombuffer(sequence.prompt, "<i4").tolist()


def test_p_tuning_takes_virtual_tokens_out_of_the_answer(door) -> None:
    """FasterTransformer's clients put the ids from prompt_learning_start_id at the front, and read the answer
    behind their prompt without them."""
    prompts = [[990, 991, 992, 5, 6], [990, 991, 992, 7], [8, 990, 9, 992]]
    output = only(ask(door, tensors(prompts, 4, prompt_learning_task_name_ids=[0, 0, 0], end_id=2)))
    engine = [[V, V + 1, V + 2, 5, 6], [V, V + 1, V + 2, 7], [8, V, 9, V + 2]]
    assert [ids(sequence) for sequence in sent(door)] == engine
    assert {sequence.learned.task for sequence in sent(door)} == {0}
    assert output["response_input_lengths"].tolist() == [[2], [1], [2]]
    assert output["sequence_length"].tolist() == [[6], [5], [6]]
    assert output["output_ids"].shape == (3, 1, 6)  # the longest row without its prompt, and the output
    assert output["output_ids"][0, 0].tolist() == [5, 6, *answer(engine[0], 4)]
    assert output["output_ids"][1, 0].tolist() == [7, *answer(engine[1], 4), 2]
    assert output["output_ids"][2, 0].tolist() == [8, 9, *answer(engine[2], 4)]


def test_a_row_without_virtual_ids_has_its_task_in_front(door) -> None:
    """An ensemble's text cannot hold virtual ids, so its task comes first, as a prefix always does."""
    output = only(ask(door, tensors([[5, 6], [5, 6]], 2, prompt_learning_task_name_ids=[0, 1])))
    assert [ids(sequence) for sequence in sent(door)] == [[V, V + 1, V + 2, 5, 6], [V, V + 1, 5, 6]]
    assert [sequence.learned.task for sequence in sent(door)] == [0, 1]
    assert output["output_ids"][1, 0].tolist() == [5, 6, *answer([V, V + 1, 5, 6], 2)]
    assert output["response_input_lengths"].tolist() == [[2], [2]]


def test_tables_of_the_request_take_the_place_of_tasks(door) -> None:
    arrays = tensors(
        [[5, 6, 7], [990, 991, 8], [5, 0, 0], [9, 9, 9]],
        3,
        prompt_learning_task_name_ids=[77, 77, 77, 77],
        **request_table([2, 2, 0, 1], [1, 3, 1, 0]),
    )
    arrays["input_lengths"][2] = 1
    output = only(ask(door, arrays))
    soft, tuned, plain, none = sent(door)
    assert (ids(soft), ids(tuned)) == ([V, V + 1, 5, 6, 7], [V, V + 1, 8])
    assert (ids(plain), plain.learned, ids(none), none.learned) == ([5], None, [9, 9, 9], None)
    assert (soft.learned.rows, soft.learned.dtype, soft.learned.is_prefix) == (2, "fp16", False)
    assert np.frombuffer(tuned.learned.values, "<f2").tolist() == [1.0] * 4 + [1.125] * 4
    assert output["response_input_lengths"].tolist() == [[3], [1], [1], [3]]
    assert output["output_ids"].shape == (4, 1, 6)
    assert output["output_ids"][0, 0].tolist() == [5, 6, 7, *answer(ids(soft), 3)]


@pytest.mark.parametrize("dtype, told", [(np.float32, "fp32"), (np.float64, "fp32"), (np.float16, "fp16")])
def test_a_table_keeps_its_precision(door, dtype, told: str) -> None:
    only(ask(door, tensors([[5]], 1, **request_table([2], 1, dtype=dtype))))
    assert sent(door)[0].learned.dtype == told


def test_a_prefix_of_the_request_has_the_values_of_all_layers(door) -> None:
    only(ask(door, tensors([[5]], 1, **request_table([3], 2, width=8))))
    learned = sent(door)[0].learned
    assert (learned.is_prefix, learned.rows, len(learned.values)) == (True, 3, 3 * 8 * 2)
    assert ids(sent(door)[0]) == [V, V + 1, V + 2, 5]


def test_an_empty_row_has_its_start_id_behind_the_prompt(door) -> None:
    arrays = tensors([[5]], 1, start_id=17, **request_table([1], 1))
    arrays["input_lengths"][:] = 0
    only(ask(door, arrays))
    assert ids(sent(door)[0]) == [V, 17]


def test_without_a_task_padding_ids_of_the_vocabulary_are_ordinary(door) -> None:
    only(ask(door, tensors([[990, 5]], 1)))
    assert (ids(sent(door)[0]), sent(door)[0].learned) == ([990, 5], None)


def spoilt(row: int, position: int, value: float) -> np.ndarray:
    values = table(2, 2)
    values[row, position, 3] = value
    return values


TWO = [[5, 6], [990, 991]]
REFUSED = {
    "a task that is not there": (
        {"prompt_learning_task_name_ids": [0, 3]},
        "prompt_learning_task_name_ids of row 1 is 3; wanted 0 to 2, the tasks mood, news, lost",
    ),
    "a task without a file": (
        {"prompt_learning_task_name_ids": 2},
        "prompt_learning_task_name_ids of row 0 is 2; the task lost cannot be served: its file is missing",
    ),
    "two of three inputs": (
        {"request_prompt_lengths": 1, "request_prompt_type": 1},
        "request_prompt_embedding is missing; request_prompt_lengths and request_prompt_type was sent",
    ),
    "one of three inputs": (
        {"request_prompt_embedding": table(2, 2)},
        "request_prompt_lengths is missing; request_prompt_embedding was sent; wanted all three or none",
    ),
    "a type that is none": (
        request_table([2, 2], [1, 4]),
        "request_prompt_type of row 1 is 4; wanted 0 (none), 1 (soft prompt), 2 (prefix prompt) or 3",
    ),
    "a length beyond the table": (
        {**request_table([2, 2], 1), "request_prompt_lengths": [2, 3]},
        "request_prompt_lengths of row 1 is 3; request_prompt_embedding has 2 positions",
    ),
    "another hidden size": (
        request_table([2, 2], 1, width=5),
        "request_prompt_embedding of row 0 has 5 values a position; wanted 4, the hidden size",
    ),
    "another size of a prefix": (
        request_table([2, 2], 2),
        "request_prompt_embedding of row 0 has 4 values a position; wanted 8, layers * 2 * kv heads *",
    ),
    "a table of another batch": (
        {**request_table([2, 2], 1), "request_prompt_embedding": table(2, 2, 2)},
        "request_prompt_embedding has shape [3, 2, 4]; wanted [2, positions, values]",
    ),
    "a NaN": (
        {**request_table([2, 2], 1), "request_prompt_embedding": spoilt(1, 0, np.nan)},
        "request_prompt_embedding of row 1 has the value nan at [0, 3]; wanted finite numbers up to 65504",
    ),
    "an infinity": (
        {**request_table([2, 2], 1), "request_prompt_embedding": spoilt(0, 1, -np.inf)},
        "request_prompt_embedding of row 0 has the value -inf at [1, 3]",
    ),
    "a value that fp16 does not hold": (
        {**request_table([2, 2], 1), "request_prompt_embedding": table(2, 2, dtype=np.float32) + 7e4},
        "request_prompt_embedding of row 0 has the value 70000.0 at [0, 0]; wanted finite numbers up to",
    ),
    "a virtual id beyond the table": (
        request_table([2, 1], 3),
        "row 1 of input_ids has the virtual token id 991; its prompt table has 1 rows, the ids 990 to 990",
    ),
    "lengths of another batch": (
        {**request_table([2, 2], 1), "request_prompt_lengths": [2, 2, 2]},
        "request_prompt_lengths has shape [3, 1]; wanted [2, 1]",
    ),
    "a prompt that is too long with its table": (
        {**request_table([300, 300], 1), "request_output_len": np.full((2, 1), 250, np.uint32)},
        "row 0 of input_ids has 302 tokens and request_output_len asks for 250 more; this model accepts 512",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_get_one_error_that_names_field_found_and_wanted(door, case: str) -> None:
    others, told = REFUSED[case]
    counts = {name: others[name] for name in others if name == "request_output_len"}
    arrays = tensors(TWO, 2, **{name: value for name, value in others.items() if name not in counts})
    before = len(door.test_engine.submits)
    code, text = refusal(ask(door, {**arrays, **counts}))
    assert code == "INVALID_ARG" and told in text, text
    assert len(door.test_engine.submits) == before


def test_a_model_without_tasks_says_so(plain_door) -> None:
    code, text = refusal(ask(plain_door, tensors([[5]], 1, prompt_learning_task_name_ids=0)))
    assert code == "INVALID_ARG"
    assert "prompt_learning_task_name_ids of row 0 is 0; wanted none: this model has no tasks" in text


def test_a_huge_table_is_refused_before_it_is_read(door) -> None:
    huge = np.broadcast_to(np.float16(1), (1, 1 << 20, 129))
    code, text = refusal(
        ask(
            door,
            tensors([[5]], 1, request_prompt_embedding=huge, request_prompt_lengths=1, request_prompt_type=1),
        )
    )
    assert code == "INVALID_ARG" and "268,435,456 bytes of prompt tables" in text


# ---------------------------------------------------------------- TensorRT-LLM's text models


@pytest.fixture(scope="module")
def text_door(tmp_path_factory) -> Iterator[Any]:
    """Its tokenizer has a token <v0> beyond the model's vocabulary, as added by clients of p-tuning."""
    folder = tmp_path_factory.mktemp("repository") / "bytes"
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<v0>", "<v1>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    limits = msgspec.structs.replace(LIMITS, vocab_size=tokenizer.token_to_id("<v0>"), end_id=0, start_id=0)
    settings = fake_triton.model_config("text", TEXT_INPUTS, TEXT_OUTPUTS, {"tokenizer_dir": "bytes"}, False)
    engine = FakeEngine(limits=limits, next_token=scripted([ord("a") - ord("!") + 1]))
    with running(TextModel, settings, engine, folder.parent) as door:
        yield door


def texts(*rows: str, **others: np.ndarray) -> dict[str, np.ndarray]:
    encoded = np.array([[row.encode()] for row in rows], object)
    return {"text_input": encoded, "max_tokens": np.full((len(rows), 1), 2, np.int32), **others}


def test_virtual_ids_of_a_text_are_rows_of_the_table(text_door) -> None:
    vocab = text_door.test_engine.limits.vocab_size
    arrays = texts("<v1>ab<v0>", "ab", prompt_embedding_table=table(3, 3))
    arrays["prompt_vocab_size"] = np.array([[2], [3]], np.int32)
    arrays["prompt_table_extra_id"] = np.array([[7], [8]], np.uint64)
    sent_before = len(text_door.test_engine.submits)
    answers = ask(text_door, arrays)
    assert all(response.error is None for response in answers)
    first, second = (submit.sequences[0] for submit in text_door.test_engine.submits[sent_before:])
    a, b = ids(first)[1:3]
    assert ids(first) == [vocab + 1, a, b, vocab] and first.learned.rows == 2
    assert ids(second) == [vocab, vocab + 1, vocab + 2, a, b] and second.learned.rows == 3
    assert answers[0].outputs["num_input_tokens"].tolist() == [[2], [2]]


TEXT_REFUSED = {
    "a size without a table": (
        {"prompt_vocab_size": np.array([[2]], np.int32)},
        "prompt_vocab_size is 2, but prompt_embedding_table was not sent",
    ),
    "a size beyond the table": (
        {"prompt_vocab_size": np.array([[4]], np.int32), "prompt_embedding_table": table(3)},
        "prompt_vocab_size of row 0 is 4; wanted 1 to 3, the rows of prompt_embedding_table",
    ),
    "a virtual id beyond the table": (
        {"prompt_embedding_table": table(1)},
        "row 0 of text_input has the virtual token id",
    ),
    "another hidden size": (
        {"prompt_embedding_table": table(3, width=7)},
        "prompt_embedding_table of row 0 has 7 values a position; wanted 4, the hidden size",
    ),
    "a NaN": (
        {"prompt_embedding_table": table(2) * np.float16(np.nan)},
        "prompt_embedding_table of row 0 has the value nan at [0, 0]",
    ),
}


@pytest.mark.parametrize("case", TEXT_REFUSED)
def test_bad_tables_of_a_text_are_refused(text_door, case: str) -> None:
    others, told = TEXT_REFUSED[case]
    code, text = refusal(ask(text_door, texts("<v1>ab", **others)))
    assert code == "INVALID_ARG" and told in text, text
