"""The table of sampling parameters against ranges that are written out here, and what a new row gives."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import Contract, with_parameters
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.wire.sampling_params import Range, SamplingParams, check, parameters
from tridecode.model_repo_templates import render
from tridecode.model_repo_templates.pbtxt import data_type_name, parse_model_config
from tridecode.tools.client.sampling_options import _WITHOUT, with_sampling_options
from tridecode.tools.generated_docs.requests import input_table, sampling_table

COUNT = ([0, 1, 2**31 - 1], [-1, 2**31], "0 to 2**31 - 1")
FRACTION = ([5e-324, 0.5, 1.0], [0.0, -0.1, 1.0000001, math.nan, math.inf], "a number in (0, 1]")
PENALTY = ([-1e6, 0.0, 1e6], [-1.000001e6, 1.000001e6, math.nan, -math.inf], "a number from -1e6 to 1e6")
#: parameter -> accepted, refused, the range in words
RANGES = {
    "max_tokens": COUNT,
    "min_tokens": COUNT,
    "temperature": ([0.0, 1e6], [-1e-9, 1.000001e6, math.nan, math.inf], "a number from 0 to 1e6"),
    "top_k": (*COUNT[:2], "0 (the whole vocabulary) to 2**31 - 1"),
    "top_p": FRACTION,
    "min_p": ([0.0, 5e-324, 1.0], [-1e-9, 1.0000001, math.nan], "a number from 0 (off) to 1"),
    "typical_p": FRACTION,
    "top_p_decay": FRACTION,
    "top_p_min": FRACTION,
    "repetition_penalty": (
        [float(np.float32(1e-6)), 1e-6, 1.0, 1e6],
        [0.0, 5e-324, 1e-40, 9e-7, -1.0, 1.000001e6, math.nan],
        "a number from 1e-6 to 1e6",
    ),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "no_repeat_ngram_size": ([0, 1, 64], [-1, 65], "0 (off) to 64"),
    "seed": ([0, 2**63, 2**64 - 1], [-1, 2**64], "0 to 2**64 - 1"),
    "beam_width": ([1, 64], [0, -1, 65], "1 to 64"),
    "len_penalty": ([-16.0, 0.0, 16.0], [-16.1, 17.0, math.nan, math.inf], "a number from -16 to 16"),
    "beam_search_diversity_rate": PENALTY,
    "early_stopping": ([0, 2], [-1, 3], "0 (by a heuristic), 1 (as soon as all are found) or 2 (never)"),
    "num_return_sequences": ([0, 64], [-1, 65], "0 (every beam, else 1) to 64"),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_value_outside_its_range_is_refused_in_one_sentence(name):
    accepted, refused, words = RANGES[name]
    for value in accepted:
        assert check(SamplingParams(**{name: value})) is None
    for value in refused:
        assert check(SamplingParams(**{name: value})) == f"{name} is {value}; wanted {words}"


def test_every_range_is_tested_here_and_the_first_fault_in_the_order_of_the_table_is_reported():
    assert [row.name for row in parameters() if row.range] == list(RANGES)
    assert (check(SamplingParams(seed=-1, top_k=-1, top_p=7.0)) or "").startswith("top_k is -1")


def test_neutral_values_are_not_sent():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(top_k=5))) == {"top_k": 5}


# ---------------------------------------------------------------- what a new row gives


#: fields that FasterTransformer's contract lacks
OURS = ("early_stopping", "num_return_sequences")


class WithTopA(SamplingParams, frozen=True, omit_defaults=True):
    """The table with one row more."""

    top_a: Annotated[float, "probability relative to the square", Range(0.0, 1.0, "a number from 0 to 1")] = (
        0.0
    )


def test_a_new_row_is_sent_and_checked():
    params = WithTopA(top_a=0.25, top_k=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=WithTopA) == params
    assert check(params) is None
    assert check(WithTopA(top_a=1.5)) == "top_a is 1.5; wanted a number from 0 to 1"


@pytest.mark.parametrize(
    ("contract", "needed"),
    [
        (FASTERTRANSFORMER, ("input_ids", "input_lengths", "request_output_len")),
        (TENSORRT_LLM, ("text_input", "max_tokens")),
    ],
)
def test_a_new_row_is_an_optional_tensor_of_a_contract_and_of_its_documentation(contract, needed):
    inputs = with_parameters(contract.inputs, "INT32", without=OURS, table=WithTopA)
    assert [field.name for field in inputs if field not in contract.inputs] == ["top_a"]
    grown = Contract(inputs, contract.outputs)
    arrays = {name: np.zeros((2, 1), contract.by_name[name].dtypes[0]) for name in needed}
    sent = Inputs({**arrays, "top_a": np.array([[0.25], [0.5]], np.float32)}, grown)
    assert [row["top_a"] for row in sent.params(2)] == [0.25, 0.5]
    text = render(
        "health.pbtxt", contract=grown, name="m", engine_model="e", batched=True, decoupled="false",
        uint32_inputs=(),
    )  # fmt: skip
    declared = {tensor.name: tensor for tensor in parse_model_config(text, "m").input}["top_a"]
    assert (data_type_name(declared.data_type), list(declared.dims), declared.optional) == ("FP32", [1], True)
    assert "| `top_a` | FP32 | [B, 1] | probability relative to the square | 0 |" in input_table(
        grown, WithTopA
    )
    assert "a number from 0 to 1 |" in sampling_table(WithTopA)


def test_a_new_row_is_an_option_of_the_command_line():
    given: list[dict[str, Any]] = []

    def command(max_tokens: int = 3, *, sampling: dict[str, Any]) -> None:
        given.append({"max_tokens": max_tokens, **sampling})

    app = typer.Typer()
    app.command()(with_sampling_options(command, WithTopA))
    result = CliRunner().invoke(app, ["--top-a", "0.25", "--top-k", "7", "--max-tokens", "9"])
    assert result.exit_code == 0, result.output
    values = {"top_a": 0.25, "top_k": 7, "max_tokens": 9}
    options = [name for name in RANGES if name not in _WITHOUT]
    assert given == [{**dict.fromkeys((*options, "top_a")), **values}]
