"""The most likely tokens of each row, and the chosen token's rank, compared with float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.sampling_states import SLOTS, add_biases, random_state
from tridecode.backend.wire.sampling_params import MAX_TOP_LOG_PROBS
from tridecode.kernels import scratch
from tridecode.kernels.build import source
from tridecode.kernels.sampling_state import SamplingState
from tridecode.kernels.top_log_probs import MOST_TOP, TopRows

BAD_WORDS = 8


def periodic(rows: int, vocab: int, random: np.random.Generator) -> np.ndarray:
    """Return large values at every 4th id of a thread and its neighbours: many candidates in few threads."""
    x = random.normal(0, 1, (rows, vocab))
    x[:, np.arange(vocab) % 1024 < 80] += 50
    return x


def nearly_impossible(rows: int, vocab: int, random: np.random.Generator) -> np.ndarray:
    """Return rows with three finite logits."""
    x = np.full((rows, vocab), -np.inf)
    for row in x:
        row[random.integers(0, vocab, 3)] = random.normal(0, 5, 3)
    return x


KINDS = {
    "normal": lambda rows, vocab, random: random.normal(0, 3, (rows, vocab)),
    "all equal": lambda rows, vocab, random: np.full((rows, vocab), -2.5),
    "zeros of both signs": lambda rows, vocab, random: random.choice([-0.0, 0.0], (rows, vocab)),
    "few values": lambda rows, vocab, random: random.integers(0, 3, (rows, vocab)) - 1.0,
    "ascending": lambda rows, vocab, random: np.tile(np.linspace(-9, 9, vocab), (rows, 1)),
    "descending": lambda rows, vocab, random: np.tile(np.linspace(9, -9, vocab), (rows, 1)),
    "periodic": periodic,
    "large": lambda rows, vocab, random: random.normal(0, 3e4, (rows, vocab)),
    "three possible": nearly_impossible,
}


def float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def wanting(place: Place, rows: int, vocab: int) -> SamplingState:
    """Return slots that request their most likely tokens, except every third one."""
    state = SamplingState.allocate(rows, 4, vocab, BAD_WORDS, place.device)
    state.column("top_log_probs")[:] = place.ints([-1 if row % 3 == 2 else row % 21 for row in range(rows)])
    return state


def buffers(place: Place, rows: int, vocab: int) -> TopRows:
    made = TopRows.allocate(rows, BAD_WORDS, vocab, place.device)
    made.top.fill_(-77)
    made.kept.fill_(float("nan"))
    return made


def check_row(top: Tensor, logits: Tensor, token: int) -> None:
    """Compare top, (2, 21) int32, with logits (V,) float32 and the chosen token."""
    row, count = logits.double(), min(MOST_TOP, len(logits))
    raw = row.log_softmax(-1)
    order = row.argsort(descending=True, stable=True)[:count]
    ids, values = top[0], top[1].view(torch.float32).double()
    assert ids[1 : 1 + count].tolist() == order.tolist()
    assert (ids[1 + count :] == -1).all() and (values[1 + count :] == -torch.inf).all()
    bound = 2e-6 * (1 + raw[torch.isfinite(raw)].abs())
    wanted = raw[order]
    finite = torch.isfinite(wanted)
    assert torch.equal(finite, torch.isfinite(values[1 : 1 + count]))
    assert ((values[1 : 1 + count] - wanted)[finite].abs() <= bound.max()).all()
    chosen = min(max(token, 0), len(logits) - 1)
    assert int(ids[0]) == int((row >= row[chosen]).sum())
    if torch.isfinite(raw[chosen]):
        assert abs(float(values[0]) - float(raw[chosen])) <= float(bound.max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 5, 19, 20, 21, 1023, 4097, 50257, 128256])
def test_the_most_likely_tokens_are_those_of_float64(place: Place, kind: str, vocab: int) -> None:
    random = np.random.default_rng([vocab, len(kind)])
    for rows in (1, 7) if place.device.type == "cpu" else (1, 7, 64):
        logits = float32(KINDS[kind](rows, vocab, random))
        tokens = random.integers(0, vocab, rows)
        tokens[::2] = logits[::2].argmax(-1).numpy()
        tokens[-1] = [-1, vocab + 5][rows % 2]
        state, top = wanting(place, rows, vocab), buffers(place, rows, vocab)
        slots = np.arange(rows)
        slots[3::8] = -1
        given = logits.to(place.device), place.ints(slots), state
        place.ops.keep_raw_logits(*given, top)
        place.ops.top_log_probs(*given, place.ints(tokens), top)
        found = top.top.cpu()
        for row in range(rows):
            if slots[row] < 0 or row % 3 == 2:
                assert (found[row] == -77).all()
            else:
                check_row(found[row], logits[row], int(tokens[row]))
        assert torch.equal(given[0].cpu(), logits)


@pytest.mark.parametrize("vocab", [37, 5000, 50257])
def test_logits_that_are_edited_between_are_put_back(place: Place, vocab: int) -> None:
    """Biases of many ids, end ids, last ids of bad words, and a repeated id."""
    random, rows = np.random.default_rng(vocab), 6
    logits = float32(random.normal(0, 3, (rows, vocab)))
    state, top = wanting(place, rows, vocab), buffers(place, rows, vocab)
    edited = logits.to(place.device)
    tokens = random.integers(0, vocab, rows)
    for slot in range(rows):
        biased = random.permutation(vocab)[: [0, 1, 30, 1024][slot % 4]]
        add_biases(state, slot, biased, random)
        ends = random.integers(0, vocab, 3)
        state.column("end_ids")[slot, :3] = place.ints(ends)
        state.column("min_tokens")[slot] = slot % 2
        words = [[int(biased[0])] if len(biased) else [0], [1, int(ends[0])], [vocab - 1]]
        state.column("num_bad_words")[slot] = len(words)
        state.bad_ids[slot, :4] = place.ints([token for word in words for token in word])
        state.bad_ends[slot, :3] = place.ints(np.cumsum([len(word) for word in words]))
    place.ops.keep_raw_logits(edited, place.ints(range(rows)), state, top)
    for slot in range(rows):
        pairs = state.biases[slot, : int(state.column("num_biases")[slot])]
        edited[slot, pairs[:, 0].long()] += 40.0
        if slot % 2:
            edited[slot, state.column("end_ids")[slot, :3].long()] = -torch.inf
        lasts = [int(state.bad_ids[slot, at]) for at in (0, 2, 3)]
        edited[slot, lasts] = -torch.inf
        tokens[slot] = int(pairs[-1, 0]) if len(pairs) else tokens[slot]
    place.ops.top_log_probs(edited, place.ints(range(rows)), state, place.ints(tokens), top)
    for row in range(rows):
        if row % 3 < 2:
            check_row(top.top[row].cpu(), logits[row], int(tokens[row]))
            assert torch.equal(edited[row].cpu(), logits[row])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [61, 3001, 50257, 128256])
def test_top_tokens_after_sample_come_from_the_raw_logits(cuda_place: Place, vocab: int) -> None:
    """All rules of `sample` except n-grams; the operations do not change the sampled tokens."""
    place, random, rows = cuda_place, np.random.default_rng(vocab), SLOTS
    for _ in range(3):
        state = random_state(place.device, vocab, rows, random, no_repeat_ngram_size=0)
        wants = place.ints(random.integers(-1, 21, rows))
        state.column("top_log_probs")[:] = wants
        logits = float32(random.normal(0, 4, (rows, vocab)))
        given, top = logits.to(place.device), buffers(place, rows, vocab)
        slots, found = place.ints(range(rows)), torch.zeros(rows, device=place.device)
        others = SamplingState(**{
            name: value.clone()
            for name in SamplingState.__dataclass_fields__
            if isinstance(value := getattr(state, name), Tensor)
        })  # fmt: skip
        tokens, wanted = slots.clone(), slots.clone()
        place.settle()
        place.ops.keep_raw_logits(given, slots, state, top)
        place.ops.sample(given, slots, state, tokens=tokens, log_probs=found)
        place.ops.top_log_probs(given, slots, state, tokens, top)
        place.ops.sample(logits.to(place.device), slots, others, tokens=wanted, log_probs=found)
        assert torch.equal(tokens, wanted) and torch.equal(state.slots, others.slots)
        for row in range(rows):
            if wants[row] < 0:
                assert (top.top[row] == -77).all()
            else:
                check_row(top.top[row].cpu(), logits[row], int(tokens[row]))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50257, 128256])
def test_a_graph_follows_the_slots(cuda_place: Place, vocab: int) -> None:
    """Replays differ in the requesting rows and in the number of rows."""
    place, rows = cuda_place, 16
    state, top = wanting(place, rows, vocab), buffers(place, rows, vocab)
    logits = torch.zeros(rows, vocab, device=place.device)
    slots, tokens = place.ints([-1] * rows), place.ints([0] * rows)

    def run() -> None:
        place.ops.keep_raw_logits(logits, slots, state, top)
        place.ops.top_log_probs(logits, slots, state, tokens, top)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    random = np.random.default_rng(0)
    for turn in range(4):
        given = float32(random.normal(0, 3, (rows, vocab)))
        logits.copy_(given)
        slots.copy_(place.ints([row if row < 4 * (turn + 1) else -1 for row in range(rows)]))
        state.column("top_log_probs")[:] = place.ints(random.integers(-1, 2, rows))
        tokens.copy_(place.ints(random.integers(0, vocab, rows)))
        top.top.fill_(-77)
        graph.replay()
        for row in range(rows):
            if slots[row] < 0 or state.column("top_log_probs")[row] < 0:
                assert (top.top[row] == -77).all()
            else:
                check_row(top.top[row].cpu(), given[row], int(tokens[row]))


@pytest.mark.gpu
def test_rows_of_any_stride_are_read(cuda_place: Place) -> None:
    place, random = cuda_place, np.random.default_rng(3)
    held = float32(random.normal(0, 3, (5, 9001)))
    for first, count in ((0, 9001), (0, 8999), (1, 9000), (4, 8996)):
        state, top = wanting(place, 5, count), buffers(place, 5, count)
        logits, slots = held.to(place.device)[:, first : first + count], place.ints(range(5))
        place.ops.keep_raw_logits(logits, slots, state, top)
        place.ops.top_log_probs(logits, slots, state, slots, top)
        for row in (0, 1, 3, 4):
            check_row(top.top[row].cpu(), held[row, first : first + count], row)


def test_the_limits_and_the_scratch_are_those_of_the_kernel() -> None:
    kernel = source("top_log_probs.cu").read_text()
    constant = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", kernel)}
    assert constant["kTop"] == MOST_TOP == MAX_TOP_LOG_PROBS
    chunks = -(-128256 // (256 * constant["kEach"]))
    row = -(-chunks * (8 * constant["kLanes"] + 8 + 4) // 16) * 16
    assert scratch.top_log_probs_bytes(3, 128256) == 3 * row
