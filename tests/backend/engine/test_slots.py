"""The sampling state's slots on the CPU: what a start writes there, and copies of slots."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tridecode.backend.engine.device.sampling import copy_slots, start_slots
from tridecode.backend.engine.step.plan import SlotStart
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.sampling_params import MAX_END_IDS
from tridecode.kernels.reference import Reference
from tridecode.kernels.sampling_state import SLOT, SamplingState

SLOTS, VOCAB, LENGTH = 6, 7, 40
CPU = torch.device("cpu")

ids = st.integers(0, VOCAB - 1)
parameters = st.builds(
    SamplingParams,
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5]),
    top_p=st.floats(0.125, 1.0, width=32),
    min_p=st.sampled_from([0.0, 0.25]),
    top_p_decay=st.sampled_from([1.0, 0.75]),
    top_p_min=st.sampled_from([1e-6, 0.25]),
    top_p_reset_id=ids,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 2**64 - 1),
    end_id=st.integers(-1, VOCAB - 1),
    more_end_ids=st.lists(ids, max_size=15),
    typical_p=st.sampled_from([1.0, 0.5]),
    no_repeat_ngram_size=st.integers(0, 3),
    logit_bias=st.dictionaries(ids, st.floats(-4, 4, width=32), max_size=4),
    allowed_token_ids=st.just([]) | st.lists(ids, min_size=1, max_size=9),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=2), max_size=2),
    return_log_probs=st.booleans(),
)
starts = st.lists(
    st.builds(
        lambda params, history, generated, masked: SlotStart(
            0, params, np.array(history, np.int32), generated, params.top_p / 2, masked
        ),
        parameters,
        st.lists(ids, min_size=1, max_size=6),
        st.integers(0, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=SLOTS,
)


def started(sequences: list[SlotStart]) -> SamplingState:
    state = SamplingState.allocate(SLOTS, LENGTH, VOCAB, 8, CPU)
    state.masks[:SLOTS, 0] = torch.tensor([0b1010101 + slot for slot in range(SLOTS)], dtype=torch.int32)
    for slot, start in enumerate(sequences):
        start.slot = slot
    start_slots(state, sequences)
    return state


def steps(
    state: SamplingState, slots: list[int], logits: torch.Tensor
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities by step. logits: (steps, V), the same for every slot."""
    tokens, log_probs = torch.zeros(len(slots), dtype=torch.int32), torch.zeros(len(slots))
    found = []
    for step in logits:
        rows = step.expand(len(slots), VOCAB).clone()
        Reference().sample(
            rows, torch.tensor(slots, dtype=torch.int32), state, tokens=tokens, log_probs=log_probs
        )
        found.append((tokens.tolist(), log_probs.tolist()))
    return found


@settings(max_examples=60, deadline=None)
@given(starts, st.permutations(range(SLOTS)), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_a_copied_slot_draws_what_the_original_would(sequences, order, before, seed) -> None:
    """Sources and destinations overlap: slot i goes to slot order[i], all at once."""
    logits = torch.randn(before + 5, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    state = started(sequences)
    held = list(range(len(sequences)))
    steps(state, held, logits[:before])
    moved = SamplingState(*(tensor.clone() for tensor in state.tensors()))
    destinations = [order[slot] for slot in held]
    copy_slots(moved, held, destinations)
    assert moved.last_tokens[destinations].tolist() == state.last_tokens[held].tolist()
    assert steps(moved, destinations, logits[before:]) == steps(state, held, logits[before:])


@settings(max_examples=60, deadline=None)
@given(starts)
def test_a_start_puts_every_parameter_into_the_column_of_its_name(sequences) -> None:
    state = started(sequences)
    columns = {name for name in SLOT.names if name in SamplingParams.__struct_fields__}
    assert len(columns) == 16, columns
    for start in sequences:
        given_values = msgspec.structs.asdict(start.params)
        for name in columns:
            value = state.column(name)[start.slot].item()
            wanted = np.array([given_values[name]], SLOT[name])[0]
            assert value == (wanted.view(np.int64) if name == "seed" else wanted), name
        ends = start.params.end_ids
        assert state.column("end_ids")[start.slot].tolist() == ends + [-1] * (MAX_END_IDS - len(ends))
        assert float(state.column("top_p_now")[start.slot]) == np.float32(start.params.top_p / 2)
        assert int(state.column("generated")[start.slot]) == start.generated
        is_masked = start.masked or bool(start.params.allowed_token_ids)
        assert bool(state.column("masked")[start.slot]) == is_masked
