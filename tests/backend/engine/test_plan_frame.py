"""Plans cross between ranks as bytes: every field arrives, and a damaged frame is refused with a text."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.backend.engine.test_step_buffers import plan_of
from tests.backend.engine.toy_device import Run, limits
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.parts.embeddings import PromptVectors
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.parts.returned_logits import FoundLogits, ReturnedLogits
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.schedule.sequence import Stage
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.plan import LateSamples, SlotStart, StepPart, StepPlan, StepResult
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit

ROOT = Path(__file__).resolve().parents[3]
EVERY_FIELD = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    typical_p=0.8,
    no_repeat_ngram_size=3,
    allowed_token_ids=[1, 9, 40],
    logit_bias={4: -1.5, 9: 2.0},
    top_p_decay=0.99,
    top_p_min=0.1,
    top_p_reset_id=3,
    repetition_penalty=1.2,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=2**64 - 1,
    beam_width=1,
    len_penalty=0.5,
    beam_search_diversity_rate=0.25,
    early_stopping=2,
    num_return_sequences=1,
    beam_pool=True,
    end_id=2,
    stop_words=[[1, 2], [3]],
    bad_words=[[4], [5, 6]],
    return_log_probs=True,
    return_context_embedding=True,
    return_context_logits=True,
    return_generation_logits=True,
    return_context_log_prob=True,
    top_log_probs=3,
)


def plans_of_a_run() -> list[StepPlan]:
    """Plans of three sequences and a fork: chunks of prompts, joins, decodes, embeddings, copies."""
    clock = iter(range(10**6))
    scheduler = Scheduler(limits(max_step_tokens=6), lambda: float(next(clock)))
    for number, length in enumerate((9, 1, 4)):
        prompt = np.arange(3, 3 + length, dtype="<i4").tobytes()
        scheduler.submit(b"door", Submit(number, [SequenceRequest(prompt, EVERY_FIELD)]))
    plans = []
    while scheduler.has_work and len(plans) < 50:
        plan = scheduler.plan()
        plans.append(plan)
        count = int(plan.samples.sum())
        tokens, log_probs = np.full(count, 9, np.int32), np.zeros(count, np.float32)
        scheduler.commit(plan, StepResult(tokens, log_probs, [result_of(part) for part in plan.parts]))
        if len(plans) == 3:
            scheduler.fork(next(s for s in plan.sequences if s.stage is Stage.DECODE), 7)
    return plans


def result_of(part: StepPart) -> object:
    """A result of zeros; None for a part without one."""
    if isinstance(part, PromptVectors):
        return [np.zeros(4, np.float32) for _ in part.rows]
    if isinstance(part, ReturnedLogits):
        rows = [np.zeros((one.count, 50) if one.targets is None else ()) for one in part.rows]
        return FoundLogits(rows, np.zeros((len(part.samples), 50), np.float32))
    return None


def assert_equal(found: object, wanted: object) -> None:
    """Field by field, with dtype and shape."""
    assert type(found) is type(wanted)
    for field in dataclasses.fields(wanted):
        if field.name == "sequences":
            continue
        mine, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(other, np.ndarray):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), field.name
            assert np.array_equal(mine, other), field.name
        elif isinstance(other, list) and other and dataclasses.is_dataclass(other[0]):
            assert len(mine) == len(other)
            for one, two in zip(mine, other):
                assert_equal(one, two)
        else:
            assert mine == other, field.name


def test_every_field_of_every_plan_arrives():
    plans = plans_of_a_run()
    assert any(plan.starts for plan in plans)
    assert any(not plan.samples.all() for plan in plans) and any(plan.num_decodes for plan in plans)
    parts = [part for plan in plans for part in plan.parts]
    kinds = {type(part) for part in parts}
    assert kinds == {PromptVectors, ReturnedLogits, TopTokens, Forks}
    forks = [part for part in parts if isinstance(part, Forks)]
    logits = [part for part in parts if isinstance(part, ReturnedLogits)]
    assert any(part.slots for part in forks) and any(part.blocks for part in forks)
    assert any(part.samples for part in logits)
    assert {one.targets is None for part in logits for one in part.rows} == {True, False}
    for plan in plans:
        if plan.num_decodes > 1:
            plan.late = [0, plan.num_decodes - 1]
        arrived = plan_frame.decode(plan_frame.encode(plan))
        assert_equal(arrived, plan)
        assert arrived.sequences == []
    assert any(plan.late for plan in plans)
    assert {field.name for field in dataclasses.fields(SlotStart)} == set(plan_frame._Start.__struct_fields__)


def test_the_adapters_of_a_plan_arrive(plan):
    assert plan.part(AdapterRows) is None
    adapters = AdapterRows(np.arange(-1, plan.num_rows - 1, dtype=np.int32), [3, 70_000])
    for part in (adapters, AdapterRows(None, [1])):
        with_adapters = dataclasses.replace(plan, parts=[*plan.parts, part])
        assert_equal(plan_frame.decode(plan_frame.encode(with_adapters)), with_adapters)


def with_beams() -> StepPlan:
    """A step with a sequence and two groups of beams."""
    run = Run(limits(max_sequences=8, num_blocks=40, max_step_tokens=16))
    run.submit(1, [1, 2], max_tokens=9)
    run.submit(2, [3, 4, 5], max_tokens=9, beam_width=2, bad_words=[[7]], end_id=9, min_tokens=5)
    run.submit(3, [6, 7, 6], max_tokens=9, beam_width=3, temperature=0.5)
    run.step()
    run.step()
    plan = run.scheduler.plan()
    assert plan is not None
    return plan


def test_the_beams_of_a_plan_arrive_and_have_no_slot():
    plan = with_beams()
    beams = plan.part(BeamRows)
    assert beams is not None and beams.rows.tolist() == [1, 2, 3, 4, 5] and beams.width == 6
    assert plan.slots.tolist()[1:] == [-1] * 5 and plan.slots[0] >= 0
    assert beams.slots.tolist() == [beam.slot for beam in plan.sequences[1:]]
    assert beams.tokens.tolist() == [beam.output[-1] for beam in plan.sequences[1:]]
    assert_equal(plan_frame.decode(plan_frame.encode(plan)), plan)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"num_rows": 4}, "rows has 20 bytes"),
        ({"num_rows": -1}, ">= 0"),
        ({"width": 0}, ">= 1"),
        ({"width": 10**6}, "<= 128"),
        ({"rows": np.array([1, 2, 3, 4, 6], "<i4").tobytes()}, "not within the 6 samples"),
        ({"rows": np.array([-1, 2, 3, 4, 5], "<i4").tobytes()}, "not within the 6 samples"),
        ({"slots": b"1234"}, "slots has 4 bytes"),
        ({"tokens": b"1" * 13}, "tokens has 13 bytes"),
        ({"slots": np.array([1, 2, 3, 4, -1], "<i4").tobytes()}, "wanted different slots from 0 on"),
        ({"slots": np.array([1, 2, 3, 4, 1], "<i4").tobytes()}, "wanted different slots from 0 on"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_beams_whose_parts_disagree_are_refused(changes, text):
    plan = with_beams()
    beams = msgspec.structs.replace(plan.part(BeamRows).encode(), **changes)
    with pytest.raises(TridecodeError, match="from rank 0") as caught:
        plan_frame.decode(with_part(plan, "beams", beams))
    assert text in str(caught.value)


@pytest.fixture()
def plan() -> StepPlan:
    return next(plan for plan in plans_of_a_run() if plan.part(PromptVectors))


def changed(plan: StepPlan, **changes) -> bytes:
    """A frame with fields that do not belong together."""
    frame = plan_frame._decoder.decode(plan_frame.encode(plan))
    return msgspec.msgpack.encode(msgspec.structs.replace(frame, **changes))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"kv_slots": b"1234567"}, "kv_slots has 7 bytes"),
        ({"num_tokens": 10**12}, "need 4,000,000,000,000"),
        ({"num_tokens": -1}, "wanted decodes <= rows <= tokens"),
        ({"num_decodes": 99}, "99 decodes"),
        ({"num_columns": 1000}, "block_tables has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_frame_whose_parts_disagree_is_refused(plan, changes, text):
    with pytest.raises(TridecodeError, match="from rank 0") as caught:
        plan_frame.decode(changed(plan, **changes))
    assert text in str(caught.value)


def with_part(plan: StepPlan, tag: str, value: object) -> bytes:
    """A frame whose part of this tag is `value`."""
    others = [(part.tag, part.encode()) for part in plan.parts if part.tag != tag]
    encoded = [(name, msgspec.Raw(msgspec.msgpack.encode(one))) for name, one in [*others, (tag, value)]]
    return changed(plan, parts=encoded)


@pytest.mark.parametrize(
    "tag, value, text",
    [
        ("forks", [[(0, -1)], []], ">= 0"),
        ("forks", [[], [(-4, 1)]], ">= 0"),
        ("forks", [[]], "cannot be read"),
        ("adapters", [b"1234567", []], "adapters has 7 bytes"),
        ("top_tokens", b"1", "top_tokens has 1 bytes"),
        ("embeddings", [(77, 0, 1, True, True, False)], "row 77"),
        ("embeddings", [(0, 1, 10**6, True, True, False)], "tokens 1 to 1000001 of row 0"),
        ("embeddings", [(0, -1, 1, True, True, False)], ">= 0"),
        ("embeddings", [(0, 0, 1)], "cannot be read"),
        ("logits", [[(77, 0, 1, None)], []], "of row 77"),
        ("logits", [[(0, 0, 1, b"12345678")], []], "targets of row 0 has 8 bytes"),
        ("logits", [[], [77]], "has sample 77"),
        ("prompt_tables", {}, "prompt_tables cannot be read"),
        ("grammar", [], "grammar is not a part"),
    ],
)
def test_a_part_that_does_not_fit_the_plan_is_refused(plan, tag, value, text):
    with pytest.raises(TridecodeError, match="from rank 0") as caught:
        plan_frame.decode(with_part(plan, tag, value))
    assert text in str(caught.value)


def test_a_part_that_comes_twice_is_refused(plan):
    part = plan.part(PromptVectors)
    with pytest.raises(TridecodeError, match="embeddings comes twice"):
        plan_frame.decode(plan_frame.encode(dataclasses.replace(plan, parts=[part, part])))


def test_rows_that_the_tokens_do_not_fill_are_refused(plan):
    starts = plan.query_starts.copy()
    starts[-1] += 1
    with pytest.raises(TridecodeError, match="query_starts does not cut"):
        plan_frame.decode(changed(plan, query_starts=starts.tobytes()))


@pytest.mark.parametrize("count", [-1, 7])
def test_more_samples_than_a_row_has_tokens_are_refused(plan, count):
    samples = plan.samples.copy()
    samples[0] = count
    with pytest.raises(TridecodeError, match="samples are not within the tokens"):
        plan_frame.decode(changed(plan, samples=samples.tobytes()))


@pytest.mark.parametrize("rows", [[], [0], [1, 3, 7]])
def test_late_samples_arrive(rows):
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (len(rows), 20)).astype(np.int32)
    late = LateSamples(7, rows, masks if rows else np.zeros((0, 0), np.int32))
    assert_equal(plan_frame.decode(plan_frame.encode(late)), late)


@pytest.mark.parametrize("rows", [[2, 1], [1, 1]])
def test_late_samples_with_wrong_rows_are_refused(rows):
    frame = plan_frame.encode(LateSamples(7, rows, np.zeros((2, 3), np.int32)))
    with pytest.raises(TridecodeError, match="late samples of plan 7 from rank 0 have a row twice, or rows"):
        plan_frame.decode(frame)


@pytest.mark.parametrize("late", [[99], [1, 0], [0, 0]])
def test_late_rows_that_do_not_decode_are_refused(late):
    plan = next(plan for plan in plans_of_a_run() if plan.num_decodes > 1)
    plan.late = late
    with pytest.raises(TridecodeError, match="wanted ascending decode rows and no queries"):
        plan_frame.decode(plan_frame.encode(plan))


def test_a_damaged_frame_is_an_error_and_nothing_else(plan):
    frame = plan_frame.encode(plan)
    generator = np.random.default_rng(0)
    for _ in range(2000):
        damaged = bytearray(frame)
        for place in generator.integers(0, len(frame), 3):
            damaged[place] = generator.integers(256)
        cut = bytes(damaged[: generator.integers(1, len(frame) + 1)])
        try:
            plan_frame.decode(cut)
        except TridecodeError:
            pass
    with pytest.raises(TridecodeError, match="cannot be read"):
        plan_frame.decode(frame[:-1])


def test_the_size_is_checked_before_memory_is_taken():
    for size in (0, -5, plan_frame.MAX_BYTES + 1, 2**62):
        with pytest.raises(TridecodeError, match="wanted 1 to"):
            plan_frame.check_size(size)


def test_no_module_of_ours_reads_pickles_or_runs_texts():
    """eval(), exec(), pickle and its relatives; torch.load only with weights_only.

    Two modules read the pickles of torch.save, by an unpickler that looks up no name by itself and whose work
    is bounded: tests/converters/sources/test_torch_file.py, test_hostile_files.py.
    """
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    unpicklers = {ROOT / "converters/sources" / name for name in ("torch_pickle.py", "pickle_limits.py")}
    for folder in ("backend", "converters", "kernels", "model_repo_templates", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                if path in unpicklers and isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in ("pickle.load", "pickle.loads"), where
                if isinstance(node, ast.Import) and path not in unpicklers:
                    assert not modules & {alias.name.split(".")[0] for alias in node.names}, where
                elif isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] not in modules, where
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec", "__import__"), where
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    safe = any(
                        k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
                    )
                    assert safe, f"{where}: torch.load without weights_only=True"


def verifying() -> StepPlan:
    """A plan of two decode rows of 3 tokens and 1, and of a prompt."""
    plan = plan_of([(3, 5, [-1, 8, 9], 3), (1, 9, [4], 1), (0, 0, [1, 2], 1)], num_decodes=2, queries=3)
    plan.context_lens[0] = -1
    return plan


def test_a_plan_that_verifies_arrives():
    assert_equal(plan_frame.decode(plan_frame.encode(verifying())), verifying())


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"queries": 17}, "<= 16"),
        ({"queries": -1}, ">= 0"),
        ({"queries": 2}, "at most 2 in each"),
        ({"queries": 0}, "2 decode rows have 4 tokens; wanted at most 1"),
        ({"samples": np.array([2, 1, 1], "<i4").tobytes()}, "all sampled"),
        ({"slots": np.array([3, 3, 0], "<i4").tobytes()}, "a slot of its own"),
        ({"context_lens": np.array([-2, 10, 2], "<i4").tobytes()}, "decode rows"),
        ({"context_lens": np.array([-1, 10, -1], "<i4").tobytes()}, "decode rows"),
    ],
)
def test_decode_rows_that_cannot_be_verified_are_refused(changes, text):
    with pytest.raises(TridecodeError, match="from rank 0") as caught:
        plan_frame.decode(changed(verifying(), **changes))
    assert text in str(caught.value)
