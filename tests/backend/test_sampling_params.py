"""The table of sampling parameters against ranges that are written out here, and what a new row gives."""

from __future__ import annotations

import math

import msgspec
import pytest

from tridecode.backend.sampling_params import SamplingParams, check, parameters

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
    "top_p_decay": FRACTION,
    "top_p_min": FRACTION,
    "repetition_penalty": ([5e-324, 1.0, 1e6], [0.0, -1.0, 1.000001e6, math.nan], "a number in (0, 1e6]"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "seed": ([0, 2**63, 2**64 - 1], [-1, 2**64], "0 to 2**64 - 1"),
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
