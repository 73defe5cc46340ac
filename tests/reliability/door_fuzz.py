"""Every tensor of every door, spoilt in every way of `door_cases`, within this process; what came of it.

    python -m tests.reliability.door_fuzz --report build/door_fuzz.md --mixed 2000 --seed 7

The doors run on the fake of Triton's utilities, in front of the real engine on a tiny GPT-2. Requests are
sent next to a control request. Each ends in one clean error that names its field, or in one answer; a greedy
answer is compared with transformers' tokens, and the control is compared bit by bit. The report has a line
for each case, to be read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests import fake_triton

fake_triton.install()

from tests.backend.doors.running import ERROR_NAMES, door_at  # noqa: E402  after the fake
from tests.backend.doors.tokenizers_at_hand import byte_level  # noqa: E402
from tests.checkpoints import tiny_gpt2  # noqa: E402
from tests.fake_engine import FakeSupervisor  # noqa: E402
from tests.real_engine import RealEngine  # noqa: E402
from tests.reliability.door_cases import ROWS, Arrays, Case, cases_of, mixed_cases  # noqa: E402
from tests.reliability.door_oracle import MOST, Oracle, Row, text_rows, token_rows  # noqa: E402
from tests.reliability.report import table  # noqa: E402
from tridecode.backend.doors.contracts.field import Contract  # noqa: E402
from tridecode.model_repo_templates.repository import CONTRACTS  # noqa: E402

END_ID = 0
LIMIT_S = 10.0
COMPARED = "as transformers"
TOGETHER = 8  # cases next to one control
#: an error says what was wanted, or what to do
REMEDY = re.compile(
    r"wanted|accepts|leave it out|needs|send |did you mean|would allow|do not belong|start it again"
)
UNCLEAN = re.compile(r"the door failed|Traceback|0x[0-9a-f]{6,}|/tmp/|site-packages|\n")
#: fields whose error is about something else, and the text that names it
NAMED_OTHERWISE = {"START": "session", "END": "session", "CORRID": "session"}


def _texts(*values: bytes) -> np.ndarray:
    return np.array([[value] for value in values], object)


def _numbers(*values: int, dtype: type = np.uint32) -> np.ndarray:
    return np.array([[value] for value in values], dtype)


TOKENS: Arrays = {
    "input_ids": np.array([[20, 21, 22], [7, 9, 11]], np.uint32),
    "input_lengths": _numbers(3, 2),
    "request_output_len": _numbers(4, 3),
    "runtime_top_k": _numbers(1, 1),
    "is_return_log_probs": np.array([[True], [True]]),
}
TEXT: Arrays = {
    "text_input": _texts(b"Hello", b"the fox"),
    "max_tokens": _numbers(4, 3, dtype=np.int32),
    "top_k": _numbers(1, 1, dtype=np.int32),
    "return_log_probs": np.array([[True], [True]]),
}
QUERY: Arrays = {
    "QUERY": _texts(b"Hello", b"the fox"),
    "BAD_WORDS_DICT": _texts(b"", b"dog"),
    "STOP_WORDS_DICT": _texts(b"", b""),
    "REQUEST_OUTPUT_LEN": _numbers(3, 2),
}
TEXT_V05: Arrays = {
    **{name: TEXT[name] for name in ("text_input", "return_log_probs")},
    "max_tokens": _numbers(4, 3),
    "top_k": _numbers(1, 1),
}
INT32_TOKENS: Arrays = {
    "input_ids": TOKENS["input_ids"].astype(np.int32),
    "input_lengths": _numbers(3, 2, dtype=np.int32),
    "request_output_len": _numbers(4, 3, dtype=np.int32),
    "runtime_top_k": _numbers(1, 1, dtype=np.int32),
    "return_log_probs": np.array([[True], [True]]),
}
INT32_QUERY: Arrays = {
    "QUERY": _texts(b"Hello", b"the fox"),
    "REQUEST_OUTPUT_LEN": _numbers(3, 2, dtype=np.int32),
}
VLLM: Arrays = {
    "text_input": np.array([b"Hello"], object),
    "sampling_parameters": np.array([b'{"max_tokens": 4, "temperature": 0, "seed": 1}'], object),
}
LLMAPI: Arrays = {
    "text_input": np.array([b"Hello"], object),
    "sampling_param_max_tokens": np.array([4], np.int32),
    "sampling_param_top_k": np.array([1], np.int32),
}
#: a conversation of one round; every tensor has an axis of 1 in front
ROUND: Arrays = {
    **{name: array[None] for name, array in TOKENS.items() if array.shape[1] > 1},
    **{name: array.reshape(1, ROWS) for name, array in TOKENS.items() if array.shape[1] == 1},
    "request_output_len": _numbers(4, 3)[None],
    "session_len": np.full((1, ROWS), 60, np.uint32),
    **{name: np.array([[1]], np.int32) for name in ("START", "READY", "END")},
    "CORRID": np.array([[1]], np.uint64),
}
BATCH: Arrays = {"TOKENS_BATCH": np.array([[[5, 6]], [[7, 8]]], np.uint32)}


@dataclass(frozen=True)
class Entry:
    """A door of the fuzz: a control request, and whether its model is decoupled. every: the suite sends one
    in `every` cases, for models that share their fields' code with another one."""

    kind: str  # of CONTRACTS, and the module's name
    control: Arrays
    decoupled: bool = False
    unary: bool = False  # answers within execute
    batched: bool = True
    every: int = 1


#: every kind of CONTRACTS but ensembles, which have no process of ours
ENTRIES = {
    "fastertransformer": Entry("fastertransformer", TOKENS),
    "fastertransformer_streaming": Entry("fastertransformer", TOKENS, decoupled=True, every=3),
    "text": Entry("text", TEXT, decoupled=True, every=2),
    "text_plain": Entry("text", TEXT, every=5),
    "text_v05": Entry("text_v05", TEXT_V05, every=2),
    "token_model": Entry("token_model", INT32_TOKENS, decoupled=True, every=3),
    "preprocessing": Entry("preprocessing", QUERY, unary=True, every=2),
    "postprocessing": Entry("postprocessing", BATCH, unary=True),
    "tensorrt_llm_preprocessing": Entry("tensorrt_llm_preprocessing", INT32_QUERY, unary=True, every=2),
    "tensorrt_llm_postprocessing": Entry(
        "tensorrt_llm_postprocessing",
        {
            "TOKENS_BATCH": BATCH["TOKENS_BATCH"].astype(np.int32),
            "SEQUENCE_LENGTH": np.full((2, 1), 2, np.int32),
        },
        unary=True,
    ),
    "vllm": Entry("vllm", VLLM, decoupled=True, batched=False),
    "llmapi": Entry("llmapi", LLMAPI, batched=False, every=2),
    "interactive": Entry("interactive", ROUND, every=2),
    "interactive_preprocessing": Entry(
        "interactive_preprocessing", {name: array[None] for name, array in QUERY.items()}, unary=True, every=3
    ),
    "interactive_postprocessing": Entry(
        "interactive_postprocessing", {"TOKENS_BATCH": BATCH["TOKENS_BATCH"][None]}, unary=True
    ),
    "health": Entry("health", {"PROBE": np.array([True])}, unary=True, batched=False),
}


@dataclass
class Outcome:
    """The end of a request. text: the error's, or the reference of an answer. complaint: "" if it
    is clean."""

    case: Case
    kind: str  # "error" or "answer"
    text: str
    complaint: str


@dataclass
class DoorFuzz:
    """The doors in front of one engine."""

    doors: dict[str, Any]
    oracle: Oracle
    references: dict[str, list] = field(default_factory=dict)
    keys: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def request(self, name: str, case: Case | None = None) -> fake_triton.InferenceRequest:
        """The case's request, or without one the control; each is a conversation of its own."""
        control = ENTRIES[name].control
        arrays, parameters = (control, {}) if case is None else (case.arrays, case.parameters)
        key = next(self.keys)
        if "CORRID" in arrays and arrays["CORRID"] is control.get("CORRID"):
            arrays = {**arrays, "CORRID": np.array([[key]], np.uint64)}
        label = "control" if case is None else ""
        return fake_triton.InferenceRequest(arrays, label, parameters, correlation_id=key)

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Cases of one door, all at once, and next to them the door's control. If it changed, one by one."""
        name = cases[0].door
        door, unary = self.doors[name], ENTRIES[name].unary
        if name not in self.references:
            self.references[name] = fake_triton.ask(door, self.request(name))
        beside = self.request(name)
        requests = [self.request(name, one) for one in cases]
        if unary:
            sent = door.execute([beside, *requests])
            for one, response in zip((beside, *requests), sent):
                one.sender.send(response, fake_triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            for one in (beside, *requests):
                door.execute([one])
        deadline = time.monotonic() + LIMIT_S
        ended = [one.sender.wait(max(0.0, deadline - time.monotonic())) for one in (beside, *requests)]
        changed = not ended[0] or not _alike(beside.sender.sent, self.references[name])
        if changed and len(cases) > 1:
            return [outcome for one in cases for outcome in self.run([one])]
        return [
            self._outcome(case, request.sender.sent if end else None, changed)
            for case, request, end in zip(cases, requests, ended[1:])
        ]

    def _outcome(self, case: Case, sent: list[fake_triton.Sent] | None, control_changed: bool) -> Outcome:
        complaint = "the control beside it changed" if control_changed else ""
        if sent is None:
            return Outcome(case, "hang", "", f"no end after {LIMIT_S:g} s")
        errors = [response.error for response in sent if response.error]
        if errors:
            text, code = errors[0].message(), ERROR_NAMES.get(errors[0].code(), "?")
            return Outcome(case, "error", text, complaint or judge_error(case, code, text, len(sent)))
        note, wrong = self.compare(case, sent)
        return Outcome(case, "answer", note, complaint or wrong)

    def run_all(self, cases: Iterable[Case]) -> list[Outcome]:
        held: dict[str, list[Case]] = {}
        for case in cases:
            held.setdefault(case.door, []).append(case)
        return [
            outcome
            for group in held.values()
            for start in range(0, len(group), TOGETHER)
            for outcome in self.run(group[start : start + TOGETHER])
        ]

    def compare(self, case: Case, sent: list[fake_triton.Sent]) -> tuple[str, str]:
        """Return the reference of an answer, and the difference from it; "" if they are equal."""
        kind = ENTRIES[case.door].kind
        if kind == "fastertransformer":
            rows = token_rows(case.arrays, self.oracle)
            return _judged(rows, lambda row: self._token_answer(case, sent, rows, row))
        if kind.startswith("interactive_"):
            return "not compared", ""
        if kind == "token_model":
            rows = token_rows(case.arrays, self.oracle)
            return _judged(rows, lambda row: self._int32_answer(sent, rows, row))
        if kind in ("text", "text_v05"):
            rows = text_rows(case.arrays, self.oracle, lambda one: byte_level().encode(one).ids)
            return _judged(rows, lambda row: self._text_answer(sent, rows, row))
        if kind.endswith("postprocessing"):
            return "as tokenizers", _decoded(case.arrays, sent)
        if kind.endswith("preprocessing"):
            return "as tokenizers", _encoded(case.arrays, sent)
        return "not compared", ""

    def _token_answer(self, case: Case, sent, rows: list[Row], row: int) -> str:
        wanted, last = self.oracle.tokens(rows[row]), sent[-1].outputs
        cut = rows[row].max_tokens > len(wanted) == MOST
        length = int(np.broadcast_to(case.arrays["input_lengths"].reshape(-1), len(rows))[row])
        found = last["output_ids"][row, 0, length : length + len(wanted)].tolist()
        total = int(last["sequence_length"].reshape(-1)[row])
        if found != wanted or (not cut and total != length + len(wanted)):
            return f"row {row} has the tokens {found} (length {total}); transformers has {wanted}"
        return ""

    def _int32_answer(self, sent, rows: list[Row], row: int) -> str:
        """TensorRT-LLM's: a response for each row, the prompt first, without the end id."""
        one = rows[row]
        (found,) = (
            each.outputs["output_ids"].reshape(-1).tolist()
            for each in sent
            if each.outputs and each.outputs["batch_index"].item() == row
        )
        wanted = [token for token in self.oracle.tokens(one) if token != one.end_id]
        if one.max_tokens > MOST:
            found = found[: len(one.given) + len(wanted)]
        return (
            "" if found == [*one.given, *wanted] else f"row {row} is {found}; wanted {[*one.given, *wanted]}"
        )

    def _text_answer(self, sent, rows: list[Row], row: int) -> str:
        answers = {
            int(number): (bytes(piece), int(count))
            for one in sent
            if one.outputs
            for piece, number, count in zip(
                one.outputs["text_output"].reshape(-1),
                one.outputs["batch_index"].reshape(-1),
                one.outputs.get("num_output_tokens", np.full(ROWS, -1)).reshape(-1),
            )
        }
        found, count = answers[row]
        tokens = self.oracle.tokens(rows[row])
        wanted = byte_level().decode([token for token in tokens if token != rows[row].end_id])
        whole = wanted.split("\ufffd")[0].rstrip()
        cut = rows[row].max_tokens > len(tokens) == MOST
        if (count not in (-1, len(tokens)) and not cut) or whole not in found.decode():
            return f"row {row} is {found!r} ({count} tokens); transformers has {wanted!r} ({len(tokens)})"
        return ""


def _judged(rows: list[Row] | None, complaint_of: Callable[[int], str]) -> tuple[str, str]:
    if rows is None:
        return "not compared: it samples, or has a field without an oracle", ""
    return COMPARED, next(filter(None, map(complaint_of, range(len(rows)))), "")


def _decoded(arrays: Arrays, sent) -> str:
    rows = arrays["TOKENS_BATCH"]
    found = [bytes(one).decode() for one in sent[-1].outputs["OUTPUT"].reshape(-1)]
    wanted = (
        [byte_level().decode(row.tolist()) for row in rows.reshape(-1, rows.shape[-1])] if rows.size else []
    )
    ends = "sequence_length" in arrays or "SEQUENCE_LENGTH" in arrays
    return "" if ends or found == wanted or not wanted else f"{found!r}; tokenizers has {wanted!r}"


def _encoded(arrays: Arrays, sent) -> str:
    queries = arrays["QUERY"]
    rows = queries.reshape(queries.shape[0] if queries.ndim else 1, -1)
    texts = [bytes(one).decode() for one in rows[:, 0]]
    found, lengths = sent[-1].outputs["INPUT_ID"], sent[-1].outputs["REQUEST_INPUT_LEN"].reshape(-1)
    for row, one in enumerate(texts):
        wanted = byte_level().encode(one).ids if len(one) < 10_000 else found[row, : lengths[row]].tolist()
        if found[row, : lengths[row]].tolist() != wanted:
            return f"row {row} has other ids than tokenizers"
    return ""


def _alike(sent: list[fake_triton.Sent], reference: list[fake_triton.Sent]) -> bool:
    """Bit by bit; a stream's responses may come in another order of rows."""

    def keys(responses: Iterable[fake_triton.Sent]) -> list[str]:
        return sorted(
            str(sorted((name, array.tolist()) for name, array in one.outputs.items() if name != "DETAIL"))
            for one in responses
            if one.outputs
        )

    return keys(sent) == keys(reference) and not any(one.error for one in sent)


def _is_gone(code: str, text: str) -> bool:
    """The error for a later round of a conversation that the door does not have."""
    return code == "NOT_FOUND" and text.startswith("session ")


def judge_error(case: Case, code: str, text: str, responses: int) -> str:
    """Return what is wrong with an error; "" if it is one clean error that names a field."""
    names = [*case.fields, *(NAMED_OTHERWISE[name] for name in case.fields if name in NAMED_OTHERWISE)]
    if responses != 1:
        return f"{responses} responses to a refused request"
    if code not in ("INVALID_ARG", "UNSUPPORTED") and not _is_gone(code, text):
        return f"code {code}"
    if UNCLEAN.search(text) or len(text) > 400:
        return "an error that is not for clients"
    if "all" not in names and not any(name in text for name in names):
        return "the error does not name the field"
    return "" if REMEDY.search(text) else "the error does not say what was wanted"


@contextlib.contextmanager
def door_fuzz() -> Iterator[DoorFuzz]:
    """All doors of ENTRIES over one engine."""
    model = tiny_gpt2(vocab_size=byte_level().get_vocab_size(), n_positions=96)
    with tempfile.TemporaryDirectory(prefix="tdfuzz") as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        byte_level().save(str(root / "tokenizer.json"))
        (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
        engine = stack.enter_context(
            RealEngine(model, max_sequences=32, max_step_tokens=64, cache_bytes=32 << 20)
        )
        supervisor = stack.enter_context(FakeSupervisor(engine))  # type: ignore[arg-type]
        doors = {name: stack.enter_context(_door(name, supervisor.endpoint, root)) for name in ENTRIES}
        yield DoorFuzz(doors, Oracle(model, engine.limits.end_id))
        assert engine.idle(), "a request is still open in the engine"


@contextlib.contextmanager
def _door(name: str, endpoint: str, root: Path) -> Iterator[Any]:
    entry = ENTRIES[name]
    outputs = {output.name: f"TYPE_{output.dtype}" for output in CONTRACTS[entry.kind].outputs}
    rows = 1024 if entry.batched else 0
    config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "."}, entry.decoupled, rows)
    model_class = importlib.import_module(f"tridecode.backend.doors.{entry.kind}").TritonPythonModel
    if entry.unary and entry.batched:
        door = model_class()
        door.initialize(fake_triton.initialize_arguments(config, str(root)))
        yield door
        return
    with door_at(model_class, config, endpoint, str(root)) as door:
        yield door


def all_cases(mixed: int, seed: int) -> Iterator[Case]:
    for name, entry in ENTRIES.items():
        contract: Contract = CONTRACTS[entry.kind]
        yield from cases_of(name, contract, entry.control)
        yield from mixed_cases(name, contract, entry.control, mixed, seed)


def report(outcomes: Iterable[Outcome]) -> str:
    """A table of the cases for each door, and the counts."""
    outcomes = list(outcomes)
    parts = [f"{len(outcomes):,} requests: {dict(Counter(one.kind for one in outcomes))}"]
    wrong = [one for one in outcomes if one.complaint]
    parts.append("\n".join(f"- NOT CLEAN: {one.case}: {one.complaint}: {one.text}" for one in wrong))
    for name in ENTRIES:
        rows = [
            [" + ".join(one.case.fields), one.case.what, _end(one)]
            for one in outcomes
            if one.case.door == name
        ]
        parts += [f"## {name}", table(["field", "case", "end"], rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _end(one: Outcome) -> str:
    return one.text if one.kind == "error" else f"{one.kind}; {one.text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--report", type=Path, help="write every case and its end here")
    parser.add_argument("--mixed", type=int, default=100, help="requests with several unusual fields, a door")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    with door_fuzz() as fuzz:
        outcomes = fuzz.run_all(all_cases(arguments.mixed, arguments.seed))
    text = report(outcomes)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(text, encoding="utf-8")
    wrong = [one for one in outcomes if one.complaint]
    print(text.split("\n##")[0])
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
