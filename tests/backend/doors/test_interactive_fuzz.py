"""Any rounds at all: one clean answer each, and a conversation next to them is answered as on its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES, only
from tests.backend.doors.test_fuzz import FT, PARAMETERS, PRE, requests
from tests.backend.doors.test_interactive import a_round, said, serving, start
from tests.backend.doors.tokenizers_at_hand import byte_level
from tridecode.backend.doors import interactive_postprocessing, interactive_preprocessing
from tridecode.backend.doors.contracts.interactive import (
    CONTROLS,
    INTERACTIVE,
    INTERACTIVE_POSTPROCESSING,
    INTERACTIVE_PREPROCESSING,
)

SENSIBLE = {
    "input_ids": FT["input_ids"][None],
    "input_lengths": FT["input_lengths"].T,
    "request_output_len": FT["request_output_len"][None],
    "session_len": np.array([[100, 100]], np.uint32),
    **{name: np.array([[1]], np.int32) for name in ("START", "READY", "END")},
}
QUIET = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def door():
    with serving() as door:
        door.control = []  # the tokens of the conversation next to
        yield door


def control(door) -> fake_triton.InferenceRequest:
    """The next round of the conversation next to them, with what it must answer."""
    new = [31, 32]
    first = len(door.control) in (0, 95)
    history = [] if first else door.control
    door.control = [*history, *new, *said([*history, *new], 3)]
    return start("beside", [new], 3) if first else a_round("beside", [new], 3)


@QUIET
@given(
    arrays=requests(INTERACTIVE, SENSIBLE),
    parameters=PARAMETERS,
    key=st.sampled_from([1, 2, 2**64 - 1, "a", "東京", 0, ""]),
    start_=st.booleans(),
)
def test_any_round_gets_one_clean_answer(door, arrays, parameters, key, start_):
    if "START" in arrays and arrays["START"].size:
        arrays["START"] = np.full_like(arrays["START"], start_)
    beside = control(door)
    request = fake_triton.InferenceRequest(arrays, parameters=parameters, correlation_id=key)
    door.execute([request, beside])
    assert request.sender.wait(60) and beside.sender.wait(60)
    sent = request.sender.sent
    assert sum(response.final for response in sent) == 1
    for response in sent:
        if response.error is not None:
            code, text = ERROR_NAMES[response.error.code()], response.error.message()
            assert code in ("INVALID_ARG", "UNSUPPORTED", "NOT_FOUND"), text
            assert "the door failed" not in text and len(text) < 500
    assert only(beside.sender.sent)["output_ids"][0, 0, 0].tolist() == door.control


@pytest.fixture(scope="module")
def unary(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    byte_level().save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    doors = {}
    for name, module, outputs in (
        ("pre", interactive_preprocessing, {"INPUT_ID": "TYPE_UINT32", "REQUEST_INPUT_LEN": "TYPE_UINT32"}),
        ("post", interactive_postprocessing, {"OUTPUT": "TYPE_STRING"}),
    ):
        config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "."})
        doors[name] = module.TritonPythonModel()
        doors[name].initialize(fake_triton.initialize_arguments(config, str(root)))
    return doors


@QUIET
@given(
    texts=requests(INTERACTIVE_PREPROCESSING, {name: array[None] for name, array in PRE.items()}),
    ids=requests(INTERACTIVE_POSTPROCESSING, {"TOKENS_BATCH": np.array([[[[5, 6]]]], np.uint32)}),
    flags=st.integers(0, 3),
)
def test_any_texts_and_ids_get_one_clean_answer(unary, texts, ids, flags):
    for name, arrays in (("pre", texts), ("post", ids)):
        (response,) = unary[name].execute(
            [fake_triton.InferenceRequest(arrays, correlation_id=5, flags=flags)]
        )
        if response.has_error():
            error = response.error()
            assert ERROR_NAMES[error.code()] in ("INVALID_ARG", "UNSUPPORTED"), error.message()


def test_the_controls_are_fields_of_the_contract():
    assert {field.name for field in INTERACTIVE.inputs if not field.declared} == set(CONTROLS)
