"""The request files in tools/requests and FasterTransformer's own, sent to the real server by our sender.

Greedy tokens are compared with transformers, log probabilities and logits too; what samples is compared with
what must follow: seeds, and a nucleus that decays to the most likely token.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.desk import REQUESTS, Desk
from tests.reliability.door_oracle import Oracle, Row, token_rows
from tridecode.tools.client.send_request import Answer, read_request, send_request

pytestmark = [pytest.mark.server, pytest.mark.slow]
END_ID = 50_256
EIGHT = [[9915, 27221, 59, 77, 383, 1853, 3327, 1462], [6601, 4237, 345, 460, 779, 284, 787, 257]] * 4


def sent(desk: Desk, name: str) -> tuple[dict[str, np.ndarray], list[Answer]]:
    """The tensors of a file of tools/requests, and the responses to it."""
    return _send(desk, json.loads((REQUESTS / name).read_text()))


def _send(desk: Desk, request: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[Answer]]:
    grpc = request.get("config", {}).get("protocol") == "grpc"
    url = desk.server.grpc_url if grpc else desk.server.http_url
    text = json.dumps({**request, "config": {**request.get("config", {}), "url": url}})
    parsed = read_request(None, text)
    return dict(parsed.tensors), list(send_request(parsed, 60))


@cache
def oracle_of(model: torch.nn.Module) -> Oracle:
    oracle = Oracle(model, model.config.eos_token_id if model.config.eos_token_id is not None else -1)
    return oracle


def greedy(
    desk: Desk, arrays: dict[str, np.ndarray], model: torch.nn.Module | None = None
) -> list[list[int]]:
    """Transformers' tokens of each row."""
    oracle = oracle_of(model or desk.model)
    rows = token_rows(arrays, oracle)
    assert rows is not None
    for row in rows:
        assert row.max_tokens <= 24
    return [oracle.tokens(row, most=24) for row in rows]


def new_tokens(arrays: dict[str, np.ndarray], answer: Answer) -> list[list[int]]:
    ends = answer.outputs["sequence_length"].reshape(-1)
    starts = arrays["input_lengths"].reshape(-1)
    return [
        answer.outputs["output_ids"][row, 0, start:end].tolist()
        for row, (start, end) in enumerate(zip(starts, ends))
    ]


# ---------------------------------------------------------------- ours


@pytest.mark.parametrize(
    "name",
    ["", "_repetition_penalty", "_penalties", "_words", "_min_length", "_log_probs", "_context_embeddings"],
)
def test_a_greedy_request_has_transformers_tokens(desk: Desk, name: str) -> None:
    arrays, (answer,) = sent(desk, f"sample_request{name}.json")
    assert new_tokens(arrays, answer) == greedy(desk, arrays)


def test_what_the_penalties_words_and_lengths_ask_for_has_an_effect(desk: Desk) -> None:
    """Otherwise the comparison above would not notice that a field is ignored."""
    arrays, _ = sent(desk, "sample_request_penalties.json")
    plain, punished = greedy(desk, arrays)
    assert plain != punished
    arrays, _ = sent(desk, "sample_request_repetition_penalty.json")
    without = {name: array for name, array in arrays.items() if name != "repetition_penalty"}
    assert greedy(desk, arrays) != greedy(desk, without)


def test_log_probabilities_are_transformers(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_log_probs.json")
    for row, tokens in enumerate(new_tokens(arrays, answer)):
        prompt = arrays["input_ids"][row].tolist()
        with torch.inference_mode():
            logits = desk.model(torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
        wanted = [float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens)]
        assert answer.outputs["output_log_probs"][row, 0, : len(tokens)] == pytest.approx(wanted, abs=2e-4)
        assert answer.outputs["cum_log_probs"][row, 0] == pytest.approx(sum(wanted), abs=2e-3)


def test_a_seed_decides_what_is_sampled(desk: Desk) -> None:
    arrays, (first,) = sent(desk, "sample_request_sampling.json")
    _, (second,) = sent(desk, "sample_request_sampling.json")
    rows = new_tokens(arrays, first)
    assert rows == new_tokens(arrays, second)
    assert rows[0] == rows[1] != rows[2]


def test_a_nucleus_that_decays_ends_with_the_most_likely_token(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_top_p_decay.json")
    oracle, reset = oracle_of(desk.model), int(arrays["top_p_reset_ids"].reshape(-1)[0])
    checked = 0
    for row, tokens in enumerate(new_tokens(arrays, answer)):
        prompt = arrays["input_ids"][row].tolist()
        for at in range(2, len(tokens)):  # 0.9 * 0.05**2: less than the best token's share
            if reset not in tokens[:at]:
                assert oracle.tokens(Row(prompt + tokens[:at], 1)) == [tokens[at]]
                checked += 1
    assert checked


def test_logits_are_transformers(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_logits.json")
    (tokens,) = new_tokens(arrays, answer)
    with torch.inference_mode():
        logits = desk.model(torch.tensor([arrays["input_ids"][0].tolist() + tokens])).logits[0].numpy()
    width = arrays["input_ids"].shape[1]
    np.testing.assert_allclose(answer.outputs["context_logits"].reshape(width, -1), logits[:width], atol=2e-4)
    made = answer.outputs["generation_logits"].reshape(len(tokens), -1)
    np.testing.assert_allclose(made, logits[width - 1 : width - 1 + len(tokens)], atol=2e-4)


def test_each_row_has_its_own_adapter(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_lora.json")
    base = greedy(desk, arrays)[0]
    adapted = greedy(desk, arrays, desk.adapted)[1]
    assert new_tokens(arrays, answer) == [base, adapted] and base != adapted


def test_beams_come_best_first(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_beams.json")
    sums = answer.outputs["cum_log_probs"]
    assert answer.outputs["output_ids"].shape[:2] == (2, 4) == sums.shape
    for row in range(2):
        ids = {tuple(beam) for beam in answer.outputs["output_ids"][row].tolist()}
        assert len(ids) == 4 and (np.diff(sums[row]) <= 1e-5).all()
    alone = greedy(desk, {name: array for name, array in arrays.items() if name != "beam_width"})
    oracle = oracle_of(desk.model)
    for row, tokens in enumerate(alone):  # the best beam is at least as likely as the greedy answer
        history, total = arrays["input_ids"][row].tolist(), 0.0
        for token in tokens:
            logits = torch.from_numpy(oracle._forward(tuple(history))).log_softmax(-1)
            total, history = total + float(logits[token]), [*history, token]
        assert sums[row, 0] >= total - 1e-3


def test_a_stream_has_a_response_for_each_token(desk: Desk) -> None:
    arrays, answers = sent(desk, "sample_request_stream.json")
    count = int(arrays["request_output_len"].item())
    lengths = [int(answer.outputs["sequence_length"].item()) for answer in answers]
    assert lengths == [5 + at for at in range(1, count + 1)]
    assert new_tokens(arrays, answers[-1]) == greedy(desk, arrays)


def test_the_text_models_agree(desk: Desk) -> None:
    """The ensemble, TensorRT-LLM's text model and vLLM's give one greedy answer to one prompt."""
    _, (ensemble,) = sent(desk, "sample_request_ensemble.json")
    _, (text,) = sent(desk, "sample_request_text.json")
    _, (vllm,) = sent(desk, "sample_request_vllm.json")
    answers = [
        ensemble.outputs["OUTPUT_0"].reshape(-1)[0].decode(),
        text.outputs["text_output"].reshape(-1)[0].decode(),
        vllm.outputs["text_output"].reshape(-1)[0].decode(),
    ]
    assert answers[0].startswith("The capital of France is") and len(answers[0]) > 30
    assert len(set(answers)) == 1


def test_tensorrt_llms_token_model_has_transformers_tokens(desk: Desk) -> None:
    arrays, (answer,) = sent(desk, "sample_request_tensorrt_llm.json")
    (wanted,) = greedy(desk, {name: array for name, array in arrays.items()})
    assert answer.outputs["output_ids"].reshape(-1).tolist() == arrays["input_ids"][0].tolist() + wanted


def test_every_file_is_sent_by_a_test() -> None:
    source = Path(__file__).read_text()
    names = [path.stem.removeprefix("sample_request") for path in REQUESTS.glob("*.json")]
    assert [
        name for name in names if f'"{name}"' not in source and f"sample_request{name}.json" not in source
    ] == []


# ---------------------------------------------------------------- FasterTransformer's, as its tools send them


def column(rows: int, name: str, value: Any, dtype: str) -> dict[str, Any]:
    values = value if isinstance(value, list) else [value] * rows
    return {"name": name, "data": [[one] for one in values], "dtype": dtype}


def original(
    prompts: list[list[int]], count: int, top_k: Any, top_p: float, words: Any
) -> list[dict[str, Any]]:
    """The inputs of fastertransformer_backend's tools/requests, in their order."""
    rows = len(prompts)
    one = [
        ("input_lengths", [len(prompt) for prompt in prompts], "uint32"),
        ("request_output_len", count, "uint32"),
        ("beam_search_diversity_rate", 0.0, "float32"),
        ("temperature", 1.0, "float32"),
        ("len_penalty", 1.0, "float32"),
        ("repetition_penalty", 1.0, "float32"),
        ("random_seed", 0, "uint64"),
        ("is_return_log_probs", True, "bool"),
        ("beam_width", 1, "uint32"),
        ("start_id", END_ID, "uint32"),
        ("end_id", END_ID, "uint32"),
        ("runtime_top_k", top_k, "uint32"),
        ("runtime_top_p", top_p, "float32"),
    ]
    return [
        {"name": "input_ids", "data": prompts, "dtype": "uint32"},
        *(column(rows, *each) for each in one),
        {"name": "bad_words_list", "data": [[[0], [-1]]] * rows, "dtype": "int32"},
        {"name": "stop_words_list", "data": words, "dtype": "int32"},
    ]


EMPTY = [[[0], [-1]]]
ORIGINALS = {
    "sample_request": original(EIGHT, 24, 1, 0.0, EMPTY * 8),
    "sample_request_single, whose stop list has an item without ids": original(
        EIGHT[:1], 24, 1, 1.0, [[[0], [0]]]
    ),
    "sample_request_runtime_top_k": original(EIGHT[:2], 24, [1, 2], 0.0, EMPTY * 2),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_fastertransformers_request_files_run_unmodified(desk: Desk, name: str) -> None:
    arrays, (answer,) = _send(desk, {"config": {"protocol": "grpc"}, "request": ORIGINALS[name]})
    rows = len(arrays["input_ids"])
    assert answer.outputs["output_ids"].shape == (rows, 1, 8 + 24)
    if name.endswith("top_k"):
        arrays = {key: array[:1] for key, array in arrays.items()}
    assert new_tokens(arrays, answer)[: len(arrays["input_ids"])] == greedy(desk, arrays)


def test_fastertransformers_stream_file_runs_unmodified(desk: Desk) -> None:
    config = {"protocol": "grpc", "model_name": "fastertransformer_streaming", "stream_api": True}
    arrays, answers = _send(desk, {"config": config, "request": original(EIGHT[:1], 40, 1, 0.0, EMPTY)})
    assert len(answers) == 40 and all("cum_log_probs" in answer.outputs for answer in answers)
    assert [int(answer.outputs["sequence_length"].item()) for answer in answers] == list(range(9, 49))


def test_fastertransformers_ensemble_file_runs_unmodified(desk: Desk) -> None:
    texts = ["Blackhawks\n The 2015 Hilltoppers", "Data sources you can use to make a decision:"]
    request = [
        column(2, "INPUT_0", texts, "object"),
        column(2, "INPUT_1", 24, "uint32"),
        column(2, "INPUT_2", ["title, title,German, German", " into the river"], "object"),
        column(2, "INPUT_3", [" Olympic Games", ""], "object"),
        column(2, "runtime_top_k", 1, "uint32"),
        column(2, "is_return_log_probs", True, "bool"),
    ]
    _, (answer,) = _send(desk, {"config": {"model_name": "ensemble"}, "request": request})
    found = [text.decode() for text in answer.outputs["OUTPUT_0"].reshape(-1)]
    assert answer.outputs["OUTPUT_0"].shape == (2,)
    assert all(one.startswith(text) and len(one) > len(text) for one, text in zip(found, texts))
    assert not any(word in found[0] for word in (" German", " title"))
