"""Every tensor of every door within this process: one clean error that names it, or transformers' answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.reliability.door_cases import Case, cases_of, mixed_cases
from tests.reliability.door_fuzz import COMPARED, ENTRIES, DoorFuzz, door_fuzz, judge_error, report
from tridecode.model_repo_templates.repository import CONTRACTS

MIXED, SEED = 12, 7


@pytest.fixture(scope="module")
def fuzz() -> Iterator[DoorFuzz]:
    with door_fuzz() as running:
        yield running


def test_every_kind_of_model_is_fuzzed() -> None:
    assert {entry.kind for entry in ENTRIES.values()} == {
        kind
        for kind in CONTRACTS
        if not kind.endswith("ensemble")  # Triton's own, without a door
    }


@pytest.mark.parametrize("name", ENTRIES)
def test_every_request_ends_in_one_clean_error_or_one_right_answer(fuzz: DoorFuzz, name: str) -> None:
    entry = ENTRIES[name]
    cases = list(cases_of(name, CONTRACTS[entry.kind], entry.control))
    cases += mixed_cases(name, CONTRACTS[entry.kind], entry.control, MIXED, SEED)
    cases = cases[:: entry.every]
    outcomes = fuzz.run_all(cases)
    assert len(outcomes) == len(cases)
    complaints = [f"{one.case}: {one.complaint}: {one.text}" for one in outcomes if one.complaint]
    assert not complaints, "\n".join(complaints)
    compared = sum(one.text == COMPARED for one in outcomes)
    assert compared > 50 or entry.kind not in ("fastertransformer", "text")


def test_a_wrong_answer_and_a_wrong_control_are_noticed(fuzz: DoorFuzz) -> None:
    """The judge itself: with other weights in the oracle, and with another reference of the control."""
    control = ENTRIES["fastertransformer"].control
    case = Case("fastertransformer", ("input_ids",), "as the control", control)
    assert fuzz.run([case])[0].complaint == ""
    right, fuzz.oracle.tokens = fuzz.oracle.tokens, lambda row: [1] * row.max_tokens  # type: ignore[method-assign]
    assert "transformers has [1, 1, 1, 1]" in fuzz.run([case])[0].complaint
    fuzz.oracle.tokens = right  # type: ignore[method-assign]
    kept = fuzz.references.pop("fastertransformer")
    fuzz.references["fastertransformer"] = []
    assert fuzz.run([case])[0].complaint == "the control beside it changed"
    fuzz.references["fastertransformer"] = kept


@pytest.mark.parametrize(
    ("code", "text", "responses", "complaint"),
    [
        ("INVALID_ARG", "top_k is -1; wanted 0 or more", 1, ""),
        ("INVALID_ARG", "something is wrong; wanted 0", 1, "does not name the field"),
        ("INVALID_ARG", "top_k is -1", 1, "does not say what was wanted"),
        ("INTERNAL", "top_k is -1; wanted 0 or more", 1, "code INTERNAL"),
        ("INVALID_ARG", "top_k is -1; wanted 0 or more", 2, "2 responses"),
        ("INVALID_ARG", "top_k: the door failed; wanted", 1, "not for clients"),
    ],
)
def test_an_unclear_error_is_noticed(code: str, text: str, responses: int, complaint: str) -> None:
    case = Case("text", ("top_k",), "value -1", {})
    found = judge_error(case, code, text, responses)
    assert complaint in found and bool(found) == bool(complaint)


def test_the_report_has_a_line_for_each_case(fuzz: DoorFuzz) -> None:
    text_control, bad = ENTRIES["text"].control, np.array([[b"\xff"], [b"a"]], object)
    cases = [
        Case("health", ("PROBE",), "value false", {"PROBE": np.array([False])}),
        Case("text", ("text_input",), "a | within", {**text_control, "text_input": bad}),
    ]
    shown = report(fuzz.run_all(cases))
    assert shown.startswith("2 requests: ") and "a / within" in shown
    assert "answer; not compared" in shown and "wanted UTF-8 text" in shown
