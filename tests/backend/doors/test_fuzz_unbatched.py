"""Any tensors and any JSON to the models without a batch axis: one clean answer, others undisturbed."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES, running
from tests.backend.doors.test_fuzz import PARAMETERS, check, requests, root
from tests.fake_engine import LIMITS, FakeEngine
from tests.reliability.door_cases import cases_of
from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.doors import llmapi, vllm
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.contracts.vllm import KEYS, KEYS_BY_NAME, VLLM
from tridecode.backend.doors.requests import sampling_json

__all__ = ["root"]
VLLM_REQUEST = {
    "text_input": np.array([b"hello"], object),
    "sampling_parameters": np.array([b'{"max_tokens": 3, "seed": 1}'], object),
}
LLMAPI_REQUEST = {
    "text_input": np.array([b"hello"], object),
    "sampling_param_max_tokens": np.array([3], np.int32),
}
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["1", "-1", "0.5", "nan", "inf", "1e999", "true", "1_0", " 5", "٣", "\ud800", "x" * 3000]
    ),
    st.sampled_from([10**400, -(10**400), 1e308, -0.0, 2**31, -(2**63)]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
NAMES = st.one_of(st.sampled_from([key.name for key in KEYS]), st.text(max_size=12))
#: values that are likely to be accepted
FITTING = st.sampled_from(
    [None, 0, 1, 2, 0.5, "1", "0.5", True, "false", [], {}, "", "fox", ["fox", "a"], [3, 7]]
)


@pytest.fixture(scope="module")
def doors(root):
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, start_id=1, end_id=2)
    with contextlib.ExitStack() as stack:
        found = {}
        for name, module, contract in (("vllm", vllm, VLLM), ("llmapi", llmapi, LLMAPI)):
            outputs = {output.name: f"TYPE_{output.dtype}" for output in contract.outputs}
            config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "."}, True, 0)
            door = running(module.TritonPythonModel, config, FakeEngine(limits=limits), root)
            found[name] = stack.enter_context(door)
        yield found


@SETTINGS
@given(arrays=requests(VLLM, VLLM_REQUEST), parameters=PARAMETERS)
def test_any_tensors_for_vllms_model_get_one_clean_answer(doors, arrays, parameters):
    check(doors["vllm"], arrays, VLLM_REQUEST, parameters)


@SETTINGS
@given(arrays=requests(LLMAPI, LLMAPI_REQUEST), parameters=PARAMETERS)
def test_any_tensors_for_the_llm_apis_model_get_one_clean_answer(doors, arrays, parameters):
    check(doors["llmapi"], arrays, LLMAPI_REQUEST, parameters)


@SETTINGS
@given(values=st.dictionaries(NAMES, st.one_of(FITTING, JSON), max_size=6), flag=st.booleans())
def test_any_sampling_parameters_get_one_clean_answer(doors, values, flag):
    sent = {**VLLM_REQUEST, "return_logprobs": np.array([flag])}
    sent["sampling_parameters"] = np.array([json.dumps(values).encode()], object)
    check(doors["vllm"], sent, VLLM_REQUEST)


@settings(max_examples=150, deadline=None)
@given(values=st.dictionaries(NAMES, st.one_of(FITTING, JSON), max_size=6))
def test_what_is_accepted_has_the_type_and_the_range_of_its_key(values):
    try:
        found = sampling_json.parse(json.dumps(values))
    except (RequestError, UnsupportedError) as error:
        assert "sampling_parameters" in str(error) and len(str(error)) < 400
        return
    sent = {name for name, value in values.items() if value is not None and not KEYS_BY_NAME[name].refused}
    assert set(found) == sent
    types = {"int": int, "float": float, "bool": bool, "text": str, "texts": list, "ids": list}
    for name, value in found.items():
        key = KEYS_BY_NAME[name]
        if key.kind == "object":  # service/structured_fields.py reads it
            continue
        assert type(value) is types[key.kind]
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (int, float)) and not isinstance(item, bool):
                assert key.low <= item <= key.high
            if isinstance(item, str):
                item.encode("utf-8")


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.text('{}[]":,0-9eE.truefalsn \\u', max_size=60)))
def test_any_text_is_parsed_or_refused_with_one_sentence(text):
    try:
        assert isinstance(sampling_json.parse(text), dict)
    except (RequestError, UnsupportedError) as error:
        assert "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        '{"seed": ' + "9" * 60_000 + "}",
        '{"stop": ' + "[" * 60_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        "{" + ", ".join(f'"k{i}": 1' for i in range(4000)) + "}",
        "{" + ", ".join('"seed": 1' for _ in range(5000)) + "}",
        '{"' + "\\u0000" * 9000 + '": 1}',
        '{"stop_token_ids": [' + "1," * 30_000 + "1]}",
        '{"logit_bias": {' + ", ".join(f'"{i}": 1' for i in range(5000)) + "}}",
    ],
    ids=["1 MB", "digits", "brackets", "objects", "unknown keys", "one key", "a long key", "ids", "biases"],
)
def test_a_large_text_costs_a_sentence(doors, text):
    sent = {**VLLM_REQUEST, "sampling_parameters": np.array([text.encode()], object)}
    check(doors["vllm"], sent, VLLM_REQUEST)
    assert fake_triton.ask(doors["vllm"], fake_triton.InferenceRequest(sent))[0].error is not None


@pytest.mark.parametrize(
    ("name", "contract", "control"), [("vllm", VLLM, VLLM_REQUEST), ("llmapi", LLMAPI, LLMAPI_REQUEST)]
)
def test_every_unusual_tensor_gets_an_answer_or_an_error_that_names_it(doors, name, contract, control):
    door, refused, answered = doors[name], 0, 0
    usual = fake_triton.ask(door, fake_triton.InferenceRequest(control))[-1].outputs["text_output"].tolist()
    for case in cases_of(name, contract, control):
        sent = fake_triton.ask(door, fake_triton.InferenceRequest(case.arrays))
        assert [one.final for one in sent] == [False] * (len(sent) - 1) + [True], str(case)
        error = sent[-1].error
        if error is None:
            answered += 1
            continue
        refused += 1
        assert ERROR_NAMES[error.code()] in ("INVALID_ARG", "UNSUPPORTED"), (str(case), error.message())
        names = (*case.fields, "text_input") if "all" in case.fields else case.fields
        assert any(one in error.message() for one in names), (str(case), error.message())
        assert len(error.message()) < 500, str(case)
    assert refused > 50 and answered > 30
    again = fake_triton.ask(door, fake_triton.InferenceRequest(control))[-1].outputs["text_output"].tolist()
    assert again == usual
