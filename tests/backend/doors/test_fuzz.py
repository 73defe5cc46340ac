"""Any tensors at all: one clean answer, never an internal error, and the next request is served as before."""

from __future__ import annotations

import contextlib
import json
import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine
from tridecode.backend.doors import (
    fastertransformer,
    postprocessing,
    preprocessing,
    tensorrt_llm_postprocessing,
    tensorrt_llm_preprocessing,
    text,
    token_model,
)
from tridecode.backend.doors.contracts.ensemble import POSTPROCESSING, PREPROCESSING
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import Contract, Field
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import (
    TENSORRT_LLM_POSTPROCESSING,
    TENSORRT_LLM_PREPROCESSING,
    TENSORRT_LLM_TOKENS,
)

EDGES = [0, 1, 2, 3, -1, 7, 999, 1000, 1023, 1025, 50256, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
REALS = [0.0, -0.0, 1.0, 0.5, -0.5, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"), 65504.0]
TEXTS = [b"", b"hello", b"\xff\xfe", b"a,b", b'"', "東京😀".encode(), b"\0", b"x" * 5000, b"<|endoftext|>"]
SHAPES = [(1, 1), (1,), (2, 1), (2,), (1, 2), (2, 2, 3), (1, 2, 1), (0,), (1, 0), (2, 2, 0), (3, 1), ()]
LARGE = [(2, 2000), (2000, 1), (5000,), (2, 2, 9000), (1, 2, 40_000), (2**40, 0), (0, 2**33), (2, 2**50, 0)]
PARAMETERS = st.dictionaries(
    st.sampled_from(["priority", "id", "triton_x", "timeout", "sequence_id", "\ud800", "stop", "x" * 70_000]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.sampled_from([1e300, -1e300, 10**400, "9" * 400, "\ud800", "a" * 2000, [1], {"a": 1}]),
        st.text(max_size=8),
    ),
    max_size=3,
)


def array_for_one(dtype: np.dtype):
    """One value of the dtype."""
    if dtype.kind == "O":
        return st.sampled_from(TEXTS)
    if dtype.kind in "fb":
        return st.sampled_from([0, 1])
    return st.sampled_from([value for value in EDGES if 0 <= value <= np.iinfo(dtype).max])


@st.composite
def array_for(draw, field: Field, sensible: np.ndarray | None):
    if sensible is not None and draw(st.integers(0, 2)):
        return sensible
    shape = draw(st.sampled_from(SHAPES * 2 + LARGE))
    dtype = np.dtype(draw(st.sampled_from(field.dtypes)))
    count = int(np.prod(shape))
    if count > 100:  # all values alike: drawing each would take too long
        return np.full(shape, draw(array_for_one(dtype)), dtype)
    if dtype.kind == "O":
        values = draw(st.lists(st.sampled_from(TEXTS), min_size=count, max_size=count))
        array = np.empty(count, object)
        array[:] = values
        return array.reshape(shape)
    if dtype.kind == "f":
        values = draw(st.lists(st.sampled_from(REALS), min_size=count, max_size=count))
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(dtype).reshape(shape)
    values = draw(st.lists(st.sampled_from(EDGES), min_size=count, max_size=count))
    bits = 8 * dtype.itemsize
    wrapped = [value % 2**bits for value in values]
    if dtype.kind == "b":
        return np.array([bool(value % 2) for value in values]).reshape(shape)
    return np.array(wrapped, np.dtype(f"u{dtype.itemsize}")).view(dtype).reshape(shape)


def requests(contract: Contract, sensible: dict[str, np.ndarray]):
    @st.composite
    def build(draw):
        optional = [field for field in contract.inputs if field.name not in sensible]
        chosen = draw(st.lists(st.sampled_from(optional), unique=True, max_size=5)) if optional else []
        needed = [field for field in contract.inputs if field.name in sensible and draw(st.integers(0, 9))]
        return {field.name: draw(array_for(field, sensible.get(field.name))) for field in [*needed, *chosen]}

    return build()


FT = {
    "input_ids": np.array([[5, 6], [7, 8]], np.uint32),
    "input_lengths": np.array([[2], [1]], np.uint32),
    "request_output_len": np.array([[3], [2]], np.uint32),
}
LLM = {
    "text_input": np.array([[b"hello"], [b"fox"]], object),
    "max_tokens": np.array([[3], [2]], np.int32),
}


PRE = {
    "QUERY": np.array([[b"hello"], [b"fox"]], object),
    "REQUEST_OUTPUT_LEN": np.array([[3], [2]], np.uint32),
}
POST = {"TOKENS_BATCH": np.array([[[5, 6]], [[7, 8]]], np.uint32)}
TOKENS = {name: array.astype(np.int32) for name, array in FT.items()}
LLM_PRE = {**PRE, "REQUEST_OUTPUT_LEN": np.array([[3], [2]], np.int32)}
LLM_POST = {
    "TOKENS_BATCH": np.array([[[5, 6]], [[7, 8]]], np.int32),
    "SEQUENCE_LENGTH": np.array([[2], [1]], np.int32),
}
LLM_PRE_OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in TENSORRT_LLM_PREPROCESSING.outputs}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    byte_level().save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return root


@pytest.fixture(scope="module")
def unary(root):
    doors = {}
    for name, module, outputs in (
        ("pre", preprocessing, {"INPUT_ID": "TYPE_UINT32", "REQUEST_OUTPUT_LEN": "TYPE_UINT32"}),
        ("post", postprocessing, {"OUTPUT": "TYPE_STRING"}),
        ("llm pre", tensorrt_llm_preprocessing, LLM_PRE_OUTPUTS),
        ("llm post", tensorrt_llm_postprocessing, {"OUTPUT": "TYPE_STRING"}),
    ):
        config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "."})
        doors[name] = module.TritonPythonModel()
        doors[name].initialize(fake_triton.initialize_arguments(config, str(root)))
    return doors


@pytest.fixture(scope="module")
def doors(root):
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, start_id=1, end_id=2)
    ft_outputs = {name: "TYPE_UINT32" for name in ("output_ids", "sequence_length")}
    ft_outputs |= {name: "TYPE_FP32" for name in ("cum_log_probs", "output_log_probs", "context_embeddings")}
    llm_outputs = {
        "text_output": "TYPE_STRING",
        "output_log_probs": "TYPE_FP32",
        "cum_log_probs": "TYPE_FP32",
    }
    ft = fake_triton.model_config("fastertransformer", {}, ft_outputs, {}, True)
    llm = fake_triton.model_config("text", {}, llm_outputs, {"tokenizer_dir": "."}, True)
    token_outputs = {output.name: f"TYPE_{output.dtype}" for output in TENSORRT_LLM_TOKENS.outputs}
    tokens = fake_triton.model_config("tensorrt_llm", {}, token_outputs, {}, True)
    models = (("ft", fastertransformer, ft), ("llm", text, llm), ("tokens", token_model, tokens))
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                running(module.TritonPythonModel, config, FakeEngine(limits=limits), root)
            )
            for name, module, config in models
        }


def check(door, arrays, sensible, parameters=None) -> None:
    beside = fake_triton.InferenceRequest(sensible)  # under way while the other is served
    door.execute([beside])
    began = time.monotonic()
    sent = fake_triton.ask(door, fake_triton.InferenceRequest(arrays, parameters=parameters))
    assert time.monotonic() - began < 5.0
    assert sum(response.final for response in sent) == 1
    errors = [response.error for response in sent if response.error]
    if errors:
        assert len(sent) == 1
        assert ERROR_NAMES[errors[0].code()] in ("INVALID_ARG", "UNSUPPORTED"), errors[0].message()
        assert "the door failed" not in errors[0].message()
        assert len(errors[0].message()) < 500
    assert beside.sender.wait(60) and not any(response.error for response in beside.sender.sent)
    after = fake_triton.ask(door, fake_triton.InferenceRequest(sensible))
    assert not any(response.error for response in after)


def check_unary(door, arrays, sensible, parameters) -> None:
    requests_ = [fake_triton.InferenceRequest(arrays, parameters=parameters)]
    requests_.append(fake_triton.InferenceRequest(sensible))
    first, second = door.execute(requests_)
    assert not second.has_error()
    if first.has_error():
        assert ERROR_NAMES[first.error().code()] in ("INVALID_ARG", "UNSUPPORTED"), first.error().message()


SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(arrays=requests(FASTERTRANSFORMER, FT), parameters=PARAMETERS)
def test_any_fastertransformer_tensors_get_one_clean_answer(doors, arrays, parameters):
    check(doors["ft"], arrays, FT, parameters)


@SETTINGS
@given(arrays=requests(TENSORRT_LLM, LLM), parameters=PARAMETERS)
def test_any_text_tensors_get_one_clean_answer(doors, arrays, parameters):
    check(doors["llm"], arrays, LLM, parameters)


@SETTINGS
@given(arrays=requests(PREPROCESSING, PRE), parameters=PARAMETERS)
def test_any_texts_to_be_tokenised_get_one_clean_answer(unary, arrays, parameters):
    check_unary(unary["pre"], arrays, PRE, parameters)


@SETTINGS
@given(arrays=requests(POSTPROCESSING, POST), parameters=PARAMETERS)
def test_any_ids_to_be_decoded_get_one_clean_answer(unary, arrays, parameters):
    check_unary(unary["post"], arrays, POST, parameters)


@settings(SETTINGS, max_examples=150)
@given(arrays=requests(TENSORRT_LLM_TOKENS, TOKENS), parameters=PARAMETERS)
def test_any_tensors_of_the_token_model_get_one_clean_answer(doors, arrays, parameters):
    arrays.pop("stop", None)  # a stop request of the same id would end the one next to it
    check(doors["tokens"], arrays, TOKENS, parameters)


@settings(SETTINGS, max_examples=100)
@given(
    pre=requests(TENSORRT_LLM_PREPROCESSING, LLM_PRE),
    post=requests(TENSORRT_LLM_POSTPROCESSING, LLM_POST),
    parameters=PARAMETERS,
)
def test_any_tensors_around_the_token_model_get_one_clean_answer(unary, pre, post, parameters):
    check_unary(unary["llm pre"], pre, LLM_PRE, parameters)
    check_unary(unary["llm post"], post, LLM_POST, parameters)


@settings(max_examples=100, deadline=None)
@given(prompt=st.binary(max_size=200))
def test_any_bytes_as_a_prompt_get_one_clean_answer(doors, prompt):
    check(doors["llm"], {**LLM, "text_input": np.array([[prompt], [b"x"]], object)}, LLM)
