"""Prompt learning through the real server: all forms over HTTP and gRPC, and the evaluation of a task.

PEFT is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import FAMILIES, save, tiny_tokenizer
from tests.integration.clients import infer, standard_inputs, stream
from tests.prompt_adapters import greedy_embedded, greedy_peft, make_prompt, prefix_table
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.cli import app
from tridecode.tools.evaluate.prompt_tasks import SQUAD
from tridecode.tools.serve.server_process import ServerProcess, running_server

TOKENS, LENGTH = 6, 5
PROMPT = [7, 9, 11, 40, 23]


class Stack(NamedTuple):
    server: ServerProcess
    model: Any
    adapted: dict[str, Any]  # answers of tasks 0 and 1
    folder: Path


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    """Make a GPT-2 with two tasks: embeddings that FP16 represents exactly, and a prefix."""
    folder = tmp_path_factory.mktemp("prompts")
    model = FAMILIES["gpt2"]()
    adapted = {kind: make_prompt(model, folder / kind, kind, LENGTH, 1, 0.5) for kind in ("prompt", "prefix")}
    for one in adapted.values():
        for parameter in one.prompt_encoder.parameters():
            parameter.data = parameter.data.half().float()
    for kind, one in adapted.items():
        one.save_pretrained(str(folder / kind))
    repository = build_repo(
        str(save(model, folder / "hf")),
        folder / "repo",
        prompts=[folder / "prompt", folder / "prefix"],
        dtype="fp32",
        parity=False,
        engine_settings={"cache_bytes": "16777216"},
    )
    with running_server(repository) as server:
        yield Stack(server, model, adapted, folder)


def asked(prompts: list[list[int]], **inputs) -> dict[str, np.ndarray]:
    arrays = standard_inputs(prompts, [TOKENS] * len(prompts))
    for name, value in inputs.items():
        is_table = isinstance(value, np.ndarray)
        arrays[name] = value if is_table else np.full((len(prompts), 1), value, np.uint32)
    return arrays


def tokens(answer, row: int = 0) -> list[int]:
    start, end = answer.as_numpy("response_input_lengths")[row, 0], answer.as_numpy("sequence_length")[row, 0]
    return answer.as_numpy("output_ids")[row, 0, start:end].tolist()


def test_every_form_gives_what_peft_gives(stack: Stack) -> None:
    """Covers tasks by number, tables in FP16 and virtual ids in the prompt, then the unchanged base model."""
    prompt, prefix = stack.adapted.values()
    wanted = {
        "prompt": greedy_peft(prompt, PROMPT, TOKENS)[0],
        "prefix": greedy_peft(prefix, PROMPT, TOKENS)[0],
    }
    table = prompt.get_prompt_embedding_to_save("default").detach().numpy().astype(np.float16)[None]
    cached = prefix_table(prefix).numpy().astype(np.float16).reshape(1, LENGTH, -1)
    start = stack.model.config.vocab_size
    virtual = [*range(start, start + LENGTH), *PROMPT]
    lengths = {"request_prompt_lengths": LENGTH}
    requests = {
        "a task": (asked([PROMPT], prompt_learning_task_name_ids=0), "prompt"),
        "its virtual ids": (asked([virtual], prompt_learning_task_name_ids=0), "prompt"),
        "a prefix": (asked([PROMPT], prompt_learning_task_name_ids=1), "prefix"),
        "a soft prompt": (
            asked([PROMPT], request_prompt_embedding=table, request_prompt_type=1, **lengths), "prompt"
        ),
        "p-tuning": (
            asked([virtual], request_prompt_embedding=table, request_prompt_type=3, **lengths), "prompt"
        ),
        "a prefix of the request": (
            asked([PROMPT], request_prompt_embedding=cached, request_prompt_type=2, **lengths), "prefix"
        ),
    }  # fmt: skip
    for protocol, url in (("http", stack.server.http_url), ("grpc", stack.server.grpc_url)):
        for name, (arrays, kind) in requests.items():
            answer = infer(protocol, url, "fastertransformer", arrays)
            assert tokens(answer) == wanted[kind], (protocol, name)
            ids = answer.as_numpy("output_ids")
            assert ids[0, 0, : len(PROMPT)].tolist() == PROMPT, (protocol, name)
            assert ids.shape == (1, 1, len(PROMPT) + TOKENS), (protocol, name)
    *_, last = stream(stack.server.grpc_url, "fastertransformer_streaming", requests["p-tuning"][0])
    assert tokens(last) == wanted["prompt"]
    plain = infer("grpc", stack.server.grpc_url, "fastertransformer", asked([PROMPT]))
    assert tokens(plain) == hf_greedy(stack.model, PROMPT, TOKENS)[0]


def test_rows_of_one_request_have_their_own_tables(stack: Stack) -> None:
    rows = [PROMPT, PROMPT[:2], PROMPT[1:], PROMPT]
    width, start = stack.model.config.n_embd, stack.model.config.vocab_size
    tables = torch.randn(4, 3, width, generator=torch.Generator().manual_seed(2)).half().float()
    arrays = asked(rows, request_prompt_embedding=tables.numpy().astype(np.float16))
    arrays["request_prompt_lengths"] = np.array([[3], [2], [0], [1]], np.uint32)
    arrays["request_prompt_type"] = np.array([[1], [3], [1], [0]], np.uint32)
    answer = infer("grpc", stack.server.grpc_url, "fastertransformer", arrays)
    for row, rows_of in enumerate((3, 2, 0, 0)):
        ids = [*range(start, start + rows_of), *rows[row]]
        assert tokens(answer, row) == greedy_embedded(stack.model, ids, tables[row], start, TOKENS)[0]


def test_texts_of_the_ensemble_and_of_tensorrt_llm_take_tables(stack: Stack) -> None:
    text, tokenizer = "The history of the city", tiny_tokenizer()
    ids, start = tokenizer(text).input_ids, stack.model.config.vocab_size
    prompt = stack.adapted["prompt"]
    found = greedy_peft(prompt, ids, TOKENS)[0]
    word = np.array([[b""]], object)
    ensemble = {
        "INPUT_0": np.array([[text.encode()]], object),
        "INPUT_1": np.array([[TOKENS]], np.uint32),
        "INPUT_2": word,
        "INPUT_3": word,
        "prompt_learning_task_name_ids": np.array([[0]], np.uint32),
    }
    answer = infer("grpc", stack.server.grpc_url, "ensemble", ensemble)
    assert answer.as_numpy("OUTPUT_0").reshape(-1)[0].decode() == tokenizer.decode(ids + found)
    table = prompt.get_prompt_embedding_to_save("default").detach().numpy().astype(np.float16)[None]
    inputs = {
        "text_input": np.array([[text.encode()]], object),
        "max_tokens": np.array([[TOKENS]], np.int32),
        "prompt_embedding_table": table,
        "prompt_vocab_size": np.array([[LENGTH]], np.int32),
    }
    *_, last = stream(stack.server.grpc_url, "tensorrt_llm_bls", inputs)
    assert last.as_numpy("text_output").reshape(-1)[0].decode() == tokenizer.decode(ids + found)
    assert start == len(stack.model.transformer.wte.weight)


def test_bad_tables_are_refused_and_the_server_lives(stack: Stack) -> None:
    table = np.full((1, 2, stack.model.config.n_embd), np.nan, np.float16)
    for arrays, told in (
        (asked([PROMPT], prompt_learning_task_name_ids=2), "wanted 0 to 1, the tasks prompt, prefix"),
        (asked([PROMPT], request_prompt_embedding=table), "request_prompt_lengths is missing"),
        (
            asked([PROMPT], request_prompt_embedding=table, request_prompt_lengths=2, request_prompt_type=1),
            r"has the value nan at \[0, 0\]",
        ),
    ):
        with pytest.raises(InferenceServerException, match=told):
            infer("http", stack.server.http_url, "fastertransformer", arrays)
    plain = infer("grpc", stack.server.grpc_url, "fastertransformer", asked([PROMPT]))
    assert tokens(plain) == hf_greedy(stack.model, PROMPT, TOKENS)[0]


def test_the_evaluation_of_a_task_runs_as_fastertransformers_does(stack: Stack, tmp_path: Path) -> None:
    """The right answers are those of PEFT: a served task gives all of them, the base model none."""
    tokenizer, prompt = tiny_tokenizer(), stack.adapted["prompt"]
    lines = []
    for question in ("who", "when is it", "why", "how far", "which city"):
        values = {"taskname": "squad", "context": "A harbour with 3 boats.", "question": question}
        ids = tokenizer(SQUAD.format(**values)).input_ids
        answer = tokenizer.decode(greedy_peft(prompt, ids, 10)[0], skip_special_tokens=True)
        lines.append(json.dumps({**values, "answer": answer.strip().split("\n")[0]}))
    data = tmp_path / "squad.jsonl"
    data.write_text("\n".join(lines))
    common = [str(data), "--url", stack.server.grpc_url, "--output", str(tmp_path / "answers.json")]
    start = str(stack.model.config.vocab_size)
    for options, exact in (
        (["--task", "0", "--batch", "2"], 100.0),
        (["--task", "0", "--start-id", start, "--positions", str(LENGTH)], 100.0),
        (["--table", str(stack.folder / "prompt"), "--start-id", start], 100.0),
        (["--table", str(stack.folder / "prompt"), "--batch", "5"], 100.0),
        ([], 0.0),
    ):
        done = CliRunner().invoke(app, ["evaluate-prompts", *common, *options])
        assert done.exit_code == 0, (done.output, done.exception)
        found = json.loads((tmp_path / "answers.json").read_text())
        assert found["questions"] == 5 and found["exact"] == exact, (options, found)
        assert f"exact {exact:.2f} %" in done.output
