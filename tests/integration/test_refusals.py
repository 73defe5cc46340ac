"""Requests that made FasterTransformer's backend read past its buffers, hang or die.

Here each gets an error that names the cause, or a documented answer, and the server continues. The tests use
the real server and a real engine.
"""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import TINY_VOCAB, save, tiny_gpt2
from tests.integration.clients import infer, stream, text_inputs, token_inputs
from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

POSITIONS = 128
PROMPTS = [[5, 9, 11], [7, 4]]


def column(*values: float, kind: type = np.uint32) -> np.ndarray:
    return np.array(values, kind)[:, None]


def words(*rows: list[list[int]]) -> np.ndarray:
    """Return the word list [B, 2, n]; each row is [ids, offsets]."""
    return np.array(rows, np.int32)


# ---------------------------------------------------------------- requests


@dataclass
class Stack:
    server: ServerProcess
    repository: Path
    model: torch.nn.Module

    def ask(self, **changes: np.ndarray):
        inputs = token_inputs(PROMPTS, [4, 4])
        return infer("grpc", self.server.grpc_url, "fastertransformer", {**inputs, **changes})

    def lives(self) -> bool:
        row = self.ask().as_numpy("output_ids")[0, 0].tolist()
        return row == PROMPTS[0] + hf_greedy(self.model, PROMPTS[0], 4)[0]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("refusals")
    settings = {"cache_bytes": "16777216", "max_bad_word_tokens": "1024"}
    checkpoint = save(tiny_gpt2(n_positions=POSITIONS), folder / "hf")
    return build_repo(str(checkpoint), folder / "repo", parity=False, engine_settings=settings)


@pytest.fixture(scope="module")
def stack(repository: Path) -> Iterator[Stack]:
    with running_server(repository) as server:
        yield Stack(server, repository, tiny_gpt2(n_positions=POSITIONS))


REFUSED: dict[str, tuple[dict[str, np.ndarray], str, str]] = {
    "a length beyond the width": ({"input_lengths": column(3, 4)}, "INVALID", "input_lengths of row 1 is 4"),
    "lengths of another batch": ({"input_lengths": column(3, 2, 1)}, "INVALID", "input_lengths|batch"),
    "an id beyond the vocabulary": (
        {"input_ids": np.array([[5, 9, 11], [7, TINY_VOCAB, 0]], np.uint32)},
        "INVALID",
        f"row 1 of input_ids has the token id {TINY_VOCAB}",
    ),
    "a prompt id, as of prompt learning": (
        {"input_ids": np.array([[2**31, 9, 11], [7, 4, 0]], np.uint32)},
        "INVALID",
        f"token id {2**31}",
    ),
    "2^31 new tokens": ({"request_output_len": column(4, 2**31)}, "INVALID", "request_output_len"),
    "2^32 - 1 new tokens": ({"request_output_len": column(2**32 - 1, 4)}, "INVALID", "request_output_len"),
    "one token more than there are positions": (
        {"request_output_len": column(POSITIONS - 2, 4)},
        "INVALID",
        f"request_output_len asks for {POSITIONS - 2} more",
    ),
    "several output lengths a row": (
        {"request_output_len": np.full((2, 3), 4, np.uint32)},
        "INVALID",
        "input 'request_output_len'|request_output_len has shape",
    ),
    "a negative temperature": ({"temperature": column(1, -1, kind=np.float32)}, "INVALID", "temperature"),
    "a temperature of NaN": ({"temperature": column(np.nan, 1, kind=np.float32)}, "INVALID", "temperature"),
    "an infinite temperature": (
        {"temperature": column(np.inf, 1, kind=np.float32)},
        "INVALID",
        "temperature",
    ),
    "a repetition penalty of 0": (
        {"repetition_penalty": column(0, 1, kind=np.float32)},
        "INVALID",
        "repetition_penalty",
    ),
    "a negative repetition penalty": (
        {"repetition_penalty": column(1, -2, kind=np.float32)},
        "INVALID",
        "repetition_penalty",
    ),
    "a top_p of NaN": ({"runtime_top_p": column(np.nan, 0, kind=np.float32)}, "INVALID", "runtime_top_p"),
    "a negative top_p": ({"runtime_top_p": column(-0.5, 0, kind=np.float32)}, "INVALID", "runtime_top_p"),
    "no beams": ({"beam_width": column(0, 0)}, "INVALID", "beam_width is 0; wanted 1 to 64"),
    "too many beams": ({"beam_width": column(65, 65)}, "INVALID", "beam_width is 65; wanted 1 to 64"),
    "no beams in one row": ({"beam_width": column(4, 0)}, "INVALID", "beam_width is 0; wanted 1 to 64"),
    "both penalties": (
        {
            "repetition_penalty": column(1.2, 1.2, kind=np.float32),
            "presence_penalty": column(0.5, 0.5, kind=np.float32),
        },
        "INVALID",
        "repetition_penalty is 1.2.* and presence_penalty is 0.5",
    ),
    "an offset beyond the words": (
        {"bad_words_list": words([[5, 6], [9, -1]], [[0, 0], [-1, -1]])},
        "INVALID",
        "bad_words_list has the offset 9",
    ),
    "offsets that fall": (
        {"stop_words_list": words([[5, 6], [2, 1]], [[0, 0], [-1, -1]])},
        "INVALID",
        "stop_words_list has the offset 1 after 2",
    ),
    "a negative id in a word": (
        {"stop_words_list": words([[-5, 6], [2, -1]], [[0, 0], [-1, -1]])},
        "INVALID",
        "stop_words_list has the token id -5",
    ),
    "words of another batch": (
        {"bad_words_list": np.tile(words([[5], [1]]), (3, 1, 1))},
        "INVALID",
        "bad_words_list|batch",
    ),
    "more stop words than there is room for": (
        {"stop_words_list": words(*[[[3] * 1025, [1025] + [-1] * 1024]] * 2)},
        "INVALID",
        "stop_words_list has 1,025 token ids",
    ),
    "a task of prompt learning": (
        {"prompt_learning_task_name_ids": column(3, 3)},
        "INVALID",
        "prompt_learning_task_name_ids of row 0 is 3; wanted none: this model has no tasks",
    ),
    "seeds of another batch": (
        {"random_seed": column(1, 2, 3, kind=np.uint64)},
        "INVALID",
        "random_seed|batch",
    ),
    "a width that no sequence has": (
        {"input_ids": np.full((2, POSITIONS + 1), 5, np.uint32)},
        "INVALID",
        f"input_ids has a width of {POSITIONS + 1}; this model accepts {POSITIONS}",
    ),
    "4,000,000 ids a row with three that count": (
        {"input_ids": np.full((2, 4_000_000), 5, np.uint32)},
        "INVALID",
        r"input_ids has shape \[2, 4000000\]; this model accepts 4,194,304 elements",
    ),
    "a long word list": (
        {"bad_words_list": np.full((2, 2, 20_000), -1, np.int32)},
        "INVALID",
        "this model accepts 16,384 ids a row",
    ),
    "two priorities": ({"priority": column(1, 2, kind=np.int32)}, "INVALID", "priority differs"),
    "another dtype": ({"random_seed": column(1, 2, kind=np.int32)}, "INVALID", "random_seed"),
    "an input that there is not": ({"session_len": column(9, 9)}, "INVALID", "session_len"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_gets_its_status_and_a_text_and_the_server_lives(stack: Stack, name: str) -> None:
    changes, status, text = REFUSED[name]
    with pytest.raises(InferenceServerException, match=text) as caught:
        stack.ask(**changes)
    assert status in caught.value.status()
    inputs = {**token_inputs(PROMPTS, [4, 4]), **changes}
    with pytest.raises(InferenceServerException, match=text):
        list(stream(stack.server.grpc_url, "fastertransformer_streaming", inputs))
    assert stack.lives()


TEXT = {"text_input": np.array([["the cat"], ["a dog"]], object), "max_tokens": column(3, 4, kind=np.int32)}
LARGE_TEXT = np.array([["hello world, " * 1_300_000], ["x"]], object)  # 16 MB
REFUSED_TEXT: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "a prompt of 16 MB": ({"text_input": LARGE_TEXT}, "text_input of row 0 has 16,900,000 bytes"),
    "20,000 bad words": (
        {"bad_words": np.array([[f"word{i}" for i in range(10_000)]] * 2, object)},
        "bad_words has 20,000 words",
    ),
    "a top_p of 2": ({"top_p": column(2, 2, kind=np.float32)}, "top_p is 2.0; wanted a number from 0"),
    "values of another batch": ({"priority": column(1, kind=np.int32)}, "batch size does not match"),
}


@pytest.mark.parametrize("name", REFUSED_TEXT)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_text_request_is_refused_before_it_is_worked_on(stack: Stack, protocol: str, name: str) -> None:
    changes, text = REFUSED_TEXT[name]
    url = getattr(stack.server, f"{protocol}_url")
    began = time.monotonic()
    with pytest.raises(InferenceServerException, match=text):
        infer(protocol, url, "tensorrt_llm_bls_plain", {**TEXT, **changes})
    assert time.monotonic() - began < 10  # mostly spent in the client and in Triton
    assert stack.lives()


def test_rows_have_priorities_of_their_own_and_an_answer_each(stack: Stack) -> None:
    inputs = {**TEXT, "priority": column(5, -5, kind=np.int32)}
    (whole,) = [infer("grpc", stack.server.grpc_url, "tensorrt_llm_bls_plain", inputs)]
    texts = whole.as_numpy("text_output").tolist()
    answers = list(stream(stack.server.grpc_url, "tensorrt_llm_bls", inputs))
    rows = {
        answer.as_numpy("batch_index").item(): answer.as_numpy("text_output").item() for answer in answers
    }
    assert len(answers) == 2 and [rows[0], rows[1]] == texts
    equal = {"priority": column(7, 7, kind=np.int32)}
    assert stack.ask(**equal).as_numpy("sequence_length").tolist() == [[7], [6]]


#: path, body, part of the error's text
BAD_HTTP: dict[str, tuple[str, bytes, str]] = {
    "an id that is not UTF-8": (
        "tensorrt_llm_bls/generate",
        b'{"id": "a\xff", "text_input": "x", "max_tokens": 1}',
        "UTF-8",
    ),
    "a parameter that is not UTF-8": (
        "tensorrt_llm_bls/generate",
        b'{"triton_x": "\xff", "text_input": "x", "max_tokens": 1}',
        "UTF-8",
    ),
    "a priority beyond every integer": (
        "ensemble/generate",
        b'{"INPUT_0": "x", "INPUT_1": 1, "INPUT_2": "", "INPUT_3": "", "priority": 1e300}',
        "priority is 1e+300",
    ),
}


@pytest.mark.parametrize("name", BAD_HTTP)
def test_what_no_message_carries_is_one_clean_error(stack: Stack, name: str) -> None:
    path, body, wanted = BAD_HTTP[name]
    request = urllib.request.Request(f"http://{stack.server.http_url}/v2/models/{path}", body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    text = caught.value.read().decode("utf-8", "replace")
    assert caught.value.code == 400 and wanted in text
    assert "/" not in text and "Traceback" not in text
    assert stack.lives()


def test_a_stopped_plain_request_ends_with_its_text(stack: Stack) -> None:
    inputs = text_inputs("the cat", 100, min_tokens=np.int32(100), exclude_input_in_output=True)
    url, answers = stack.server.grpc_url, []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # a tiny model may finish before it is stopped
            asked = pool.submit(infer, "grpc", url, "tensorrt_llm_bls_plain", inputs, request_id="mine")
            while not asked.done() and len(answers) < 1:
                infer("grpc", url, "tensorrt_llm_bls_plain", text_inputs("", 1, stop=True), request_id="mine")
                time.sleep(0.02)
            answer = asked.result(30)
            if answer.as_numpy("finish_reason").item() == b"abort":
                answers.append(answer)
                break
    assert answers and answers[0].as_numpy("num_output_tokens").item() < 100
    assert stack.lives()


def test_no_new_tokens_give_the_prompt_back(stack: Stack) -> None:
    answer = stack.ask(request_output_len=column(0, 0), is_return_log_probs=column(1, 1, kind=bool))
    assert answer.as_numpy("output_ids").tolist() == [[[5, 9, 11]], [[7, 4, 0]]]
    assert answer.as_numpy("output_log_probs").shape == (2, 1, 0)
    assert answer.as_numpy("cum_log_probs").tolist() == [[0.0], [0.0]]
    inputs = {**token_inputs(PROMPTS, [0, 0])}
    seen = list(stream(stack.server.grpc_url, "fastertransformer_streaming", inputs))
    assert len(seen) == 1 and seen[0].as_numpy("sequence_length").tolist() == [[3], [2]]


def test_an_empty_row_goes_on_from_its_start_id(stack: Stack) -> None:
    answer = stack.ask(input_lengths=column(0, 2), start_id=column(9, 9))
    wanted = hf_greedy(stack.model, [9], 4)[0]
    assert answer.as_numpy("output_ids")[0, 0, :4].tolist() == wanted
    assert answer.as_numpy("sequence_length").tolist() == [[4], [6]]


def test_a_sequence_may_fill_every_position(stack: Stack) -> None:
    answer = stack.ask(request_output_len=column(POSITIONS - 3, 4))
    wanted = hf_greedy(stack.model, PROMPTS[0], POSITIONS - 3)[0]
    new = wanted.index(0) + 1 if 0 in wanted else len(wanted)  # the end id is 0
    length = answer.as_numpy("sequence_length")[0, 0]
    assert length == len(PROMPTS[0]) + new
    assert answer.as_numpy("output_ids")[0, 0, :length].tolist() == PROMPTS[0] + wanted[:new]


def test_a_temperature_of_0_is_greedy_beside_rows_that_are_not(stack: Stack) -> None:
    answer = stack.ask(temperature=column(0, 1, kind=np.float32), runtime_top_k=column(40, 40))
    assert (
        answer.as_numpy("output_ids")[0, 0].tolist() == PROMPTS[0] + hf_greedy(stack.model, PROMPTS[0], 4)[0]
    )


def test_log_probabilities_are_each_rows_own_choice(stack: Stack) -> None:
    answer = stack.ask(is_return_log_probs=column(0, 1, kind=bool))
    log_probs = answer.as_numpy("output_log_probs")
    assert (log_probs[0] == 0).all() and (log_probs[1] < 0).all()


def test_where_every_token_is_banned_the_request_is_refused(stack: Stack) -> None:
    every = np.arange(TINY_VOCAB, dtype=np.int32)
    banned = np.stack([every, every + 1])[None]
    with pytest.raises(InferenceServerException, match="no token is possible after") as caught:
        stack.ask(bad_words_list=np.tile(banned, (2, 1, 1)))
    assert "INVALID_ARGUMENT" in str(caught.value.status())
    assert stack.lives()


# ---------------------------------------------------------------- repositories


def test_stop_words_end_a_text_on_pipeline_stages_too(repository: Path, stack: Stack, tmp_path) -> None:
    copy = tmp_path / "repo"
    shutil.copytree(repository, copy)
    _parameter("pipeline_para_size", "2")(copy)
    rows = [hf_greedy(stack.model, prompt, 6)[0] for prompt in PROMPTS]
    lists = words(*[[[row[2]], [1]] for row in rows])
    wanted = [[len(prompt) + row.index(row[2]) + 1] for prompt, row in zip(PROMPTS, rows)]
    with running_server(copy) as server:
        staged = Stack(server, copy, stack.model)
        for one in (stack, staged):
            answer = one.ask(request_output_len=column(6, 6), stop_words_list=lists)
            assert answer.as_numpy("sequence_length").tolist() == wanted


def _parameter(name: str, value: str) -> Callable[[Path], None]:
    def edit(repository: Path) -> None:
        path = repository / "fastertransformer" / "config.pbtxt"
        pattern = rf'(key: "{name}" value: {{ string_value: )"[^"]*"'
        text, count = re.subn(pattern, rf'\1"{value}"', path.read_text())
        assert count == 1
        path.write_text(text)

    return edit


def _ini(key: str, value: str | None) -> Callable[[Path], None]:
    def edit(repository: Path) -> None:
        path = repository / "fastertransformer" / "1" / "1-gpu" / "config.ini"
        line = "" if value is None else f"{key} = {value}"
        text, count = re.subn(rf"(?m)^{key} *=.*$", line, path.read_text())
        assert count == 1
        path.write_text(text)

    return edit


_FILE = "model.layers.1.mlp.dense_h_to_4h.weight.0.bin"


def _no_file(repository: Path) -> None:
    (repository / "fastertransformer" / "1" / "1-gpu" / _FILE).unlink()


def _short_file(repository: Path) -> None:
    path = repository / "fastertransformer" / "1" / "1-gpu" / _FILE
    path.write_bytes(path.read_bytes()[:-4])


def _swapped_files(repository: Path) -> None:
    one = repository / "fastertransformer" / "1" / "1-gpu" / _FILE
    other = one.with_name(one.name.replace("layers.1", "layers.0"))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tensor ranks": (_parameter("tensor_para_size", "0"), "tensor_para_size is 0; wanted 1 or more"),
    "no pipeline stages": (
        _parameter("pipeline_para_size", "0"),
        "pipeline_para_size is 0; wanted 1 or more",
    ),
    "an unknown data type": (_parameter("data_type", "fp8"), "data_type is 'fp8'; wanted one of fp32, fp16"),
    "more ranks than heads": (_parameter("tensor_para_size", "2"), "tensor_para_size = 2 does not divide"),
    "a missing key": (_ini("head_num", None), r"section \[gpt\] has no head_num"),
    "a layer too many": (_ini("num_layer", "3"), "num_layer is 3; the weights were converted with 2"),
    "another width": (_ini("inter_size", "100"), "inter_size is 100; the weights were converted with"),
    "swapped files": (_swapped_files, "dense_h_to_4h.weight.0.bin is not the file that was converted"),
    "a missing file": (_no_file, re.escape(_FILE)),
    "a short file": (_short_file, re.escape(_FILE) + " holds [0-9,]+ bytes; .* needs"),
}


#: one error in each kind of file; backend/test_config.py and test_manifest.py have more, without a server
_OF_EACH_FILE = ("more ranks than heads", "a missing key", "another width", "a short file")


@pytest.mark.parametrize(
    "name",
    [name if name in _OF_EACH_FILE else pytest.param(name, marks=pytest.mark.nightly) for name in BROKEN],
)
def test_a_broken_repository_is_refused_at_once_with_the_reason(repository: Path, tmp_path, name) -> None:
    break_it, text = BROKEN[name]
    copy = tmp_path / "repo"
    shutil.copytree(repository, copy)
    break_it(copy)
    started = time.monotonic()
    with pytest.raises(TridecodeError, match=text):
        with running_server(copy):
            pass
    assert time.monotonic() - started < 40
