"""FasterTransformer's rules of sampling, one by one and together, as exact probabilities in float64.

`exact` is the contract in numpy, checked against transformers' processors. Pearson's chi-square over many
seeds compares draws with it. The seeds are fixed, so a test's outcome never changes. The limit is the 99.99 %
quantile: with other seeds a right sampler would fail a case once in 10,000 times. Each test of a rule also
shows that the draws do not fit the rule's likely mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.kernels.conftest import Place
from tridecode.backend.engine.device.sampling import start_slots
from tridecode.backend.engine.step.plan import SlotStart
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.kernels.reference import Reference
from tridecode.kernels.sampling_state import SamplingState

VOCAB = 24
BATCH = 64  # rows per call
DRAWS = 448  # draws per case, each with its own seed
LOGITS = np.random.default_rng(7).normal(0, 1.6, VOCAB).astype(np.float32)
BEST, SECOND, THIRD = np.argsort(-LOGITS)[:3].tolist()
PROMPT, OUTPUT = [3, THIRD, THIRD, SECOND, 3], [THIRD, 5]
ORDER = (
    "biases", "allowed ids", "bad words", "n-grams", "temperature", "penalties", "min_tokens", "min_p",
    "top_k", "top_p", "typical_p",
)  # fmt: skip


@dataclass
class State:
    """State of one sequence that the rules read and change."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits: np.ndarray = field(default_factory=lambda: LOGITS.astype(np.float64))

    @property
    def history(self) -> list[int]:
        return self.prompt + self.output


def _biases(state: State) -> None:
    for token, bias in state.params.logit_bias.items():
        state.logits[token] += bias


def _allowed(state: State) -> None:
    others = set(range(VOCAB)).difference(state.params.allowed_token_ids or range(VOCAB))
    state.logits[list(others)] = -np.inf


def _n_grams(state: State) -> None:
    """Exclude the ids that end an n-gram which the history has already."""
    size, history = state.params.no_repeat_ngram_size, state.history
    if size:
        grams = [history[at : at + size] for at in range(len(history) - size + 1)]
        ending = history[len(history) - size + 1 :]
        state.logits[[gram[-1] for gram in grams if gram[:-1] == ending]] = -np.inf


def _bad_words(state: State) -> None:
    for *before, last in state.params.bad_words:
        if not before or state.history[-len(before) :] == before:
            state.logits[last] = -np.inf


def _temperature(state: State) -> None:
    state.logits /= state.params.temperature


def _penalties(state: State) -> None:
    params = state.params
    for token in set(state.history):
        factor = params.repetition_penalty
        state.logits[token] *= factor if state.logits[token] < 0 else 1 / factor
        state.logits[token] -= params.presence_penalty
        state.logits[token] -= params.frequency_penalty * state.history.count(token)


def _min_tokens(state: State) -> None:
    if len(state.output) < state.params.min_tokens:
        state.logits[state.params.end_ids] = -np.inf


def _min_p(state: State) -> None:
    if state.params.min_p:
        probabilities = np.exp(state.logits - state.logits.max())
        state.logits[probabilities < state.params.min_p] = -np.inf


def _top_k(state: State) -> None:
    if state.params.top_k:
        state.logits[np.argsort(-state.logits)[state.params.top_k :]] = -np.inf


def _top_p(state: State) -> None:
    """Return the smallest set of most likely ids with mass p, among those that top-k kept."""
    order = np.argsort(-state.logits)
    mass = np.exp(state.logits[order] - state.logits.max())
    before = np.concatenate([[0], np.cumsum(mass / mass.sum())[:-1]])
    state.logits[order[before >= state.params.top_p]] = -np.inf


def _typical_p(state: State) -> None:
    """Keep the ids with the most typical information content, of probability typical_p in total."""
    if state.params.typical_p == 1:
        return
    mass = np.exp(state.logits - state.logits.max())
    mass /= mass.sum()
    content = -np.log(mass, where=mass > 0, out=np.full(VOCAB, -np.inf))
    distance = np.abs(content - (mass[mass > 0] * content[mass > 0]).sum())
    distance[mass == 0] = np.inf
    order = np.argsort(distance)
    before = np.concatenate([[0], np.cumsum(mass[order])[:-1]])
    state.logits[order[before >= state.params.typical_p]] = -np.inf


RULES = {
    "biases": _biases,
    "allowed ids": _allowed,
    "bad words": _bad_words,
    "n-grams": _n_grams,
    "temperature": _temperature,
    "penalties": _penalties,
    "min_tokens": _min_tokens,
    "min_p": _min_p,
    "top_k": _top_k,
    "top_p": _top_p,
    "typical_p": _typical_p,
}


def exact(params: SamplingParams, prompt=PROMPT, output=OUTPUT, order=ORDER) -> np.ndarray:
    """Return (VOCAB,) float64, the probability of each id."""
    state = State(params, list(prompt), list(output))
    for rule in order:
        RULES[rule](state)
    weights = np.exp(state.logits - state.logits.max())
    return weights / weights.sum()


def swapped(first: str, second: str) -> tuple[str, ...]:
    """Return the order of the rules with two of them swapped."""
    return tuple({first: second, second: first}.get(rule, rule) for rule in ORDER)


def make_state(place: Place, cases: list[SamplingParams], prompt=PROMPT, output=OUTPUT) -> SamplingState:
    """Initialise slot i from cases[i] with the engine's own code."""
    state = SamplingState.allocate(len(cases), 32, VOCAB, 16, place.device)
    history = np.array([*prompt, *output], np.int32)
    starts = [SlotStart(slot, p, history, len(output), p.top_p) for slot, p in enumerate(cases)]
    start_slots(state, starts)
    return state


def sample(place: Place, state: SamplingState, slots: list[int]) -> tuple[list[int], list[float]]:
    tokens = place.ints([-7] * len(slots))
    log_probs = torch.zeros(len(slots), device=place.device)
    logits = torch.from_numpy(np.tile(LOGITS, (len(slots), 1))).to(place.device)
    place.settle()
    place.ops.sample(logits, place.ints(slots), state, tokens=tokens, log_probs=log_probs)
    return tokens.tolist(), log_probs.tolist()


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**values, "seed": seed})


def counts_of(place: Place, cases: list[SamplingParams], draws: int = DRAWS) -> np.ndarray:
    """Return (cases, VOCAB), the number of draws of each id. Rows of all cases share batches."""
    counts = np.zeros((len(cases), VOCAB))
    rows = [(case, seed) for seed in range(draws) for case in range(len(cases))]
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        state = make_state(place, [seeded(cases[case], seed) for case, seed in batch])
        tokens, _ = sample(place, state, list(range(len(batch))))
        for (case, _), token in zip(batch, tokens):
            counts[case, token] += 1
    return counts


def misfit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return Pearson's chi-square in units of its 99.99 % quantile; infinite if an impossible id was drawn.
    Ids with fewer than 5 expected draws form one class."""
    if counts[probabilities == 0].any():
        return np.inf
    expected = probabilities * counts.sum()
    common = expected >= 5
    found = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
    quantile = freedom * (1 - spread + 3.719 * np.sqrt(spread)) ** 3
    return float(((found - wanted) ** 2 / wanted).sum() / quantile)


def params(**values) -> SamplingParams:
    return SamplingParams(**{"top_k": 0, **values})


#: parameters by name, and mistakes that their draws must not fit. None: exact log probs suffice, no draws
CASES: dict[str, tuple[SamplingParams, SamplingParams | tuple[str, ...] | None]] = {
    "the whole vocabulary": (params(), params(temperature=1.6)),
    "temperature": (params(temperature=2.5), params(temperature=1.2)),
    "a low temperature": (params(temperature=0.5), None),
    "top-k": (params(top_k=5), params(top_k=6)),
    "top-k above the vocabulary": (params(top_k=VOCAB), None),
    "top-p": (params(top_p=0.6), params(top_p=0.7)),
    "top-k and top-p": (params(top_k=8, top_p=0.7), params(top_p=0.7)),
    "top-p within top-k, not before it": (params(top_k=6, top_p=0.8), swapped("top_k", "top_p")),
    "min-p": (params(min_p=0.12), params(min_p=0.25)),
    "min-p of 1": (params(min_p=1.0), None),
    "min-p after temperature": (params(min_p=0.3, temperature=2.5), swapped("min_p", "temperature")),
    "min-p after penalties": (params(min_p=0.2, presence_penalty=1.0), swapped("min_p", "penalties")),
    "min-p and more than top-k leaves": (params(min_p=0.02, top_k=4), params(min_p=0.02)),
    "min-p and less than top-k leaves": (params(min_p=0.3, top_k=12), params(top_k=12)),
    "top-p within min-p, not before it": (params(min_p=0.2, top_p=0.85), swapped("min_p", "top_p")),
    "min-p, top-k and top-p": (params(min_p=0.1, top_k=6, top_p=0.8), params(min_p=0.1, top_k=6)),
    "repetition penalty": (params(repetition_penalty=1.8), None),
    "repetition penalty below 1": (params(repetition_penalty=0.6), None),
    "presence penalty": (params(presence_penalty=1.0), None),
    "frequency penalty": (params(frequency_penalty=0.8), None),
    "presence after temperature": (params(presence_penalty=2.0, temperature=2.5), None),
    "no end yet": (params(min_tokens=3, end_id=BEST), None),
    "none of three ends yet": (params(min_tokens=3, end_id=BEST, more_end_ids=[SECOND, 7]), None),
    "an end": (params(min_tokens=2, end_id=BEST), None),
    "bad words": (params(bad_words=[[SECOND], [0], [THIRD, 5, 6], [14, 5, 7]]), params(bad_words=[[0]])),
    "a bad word that begins in the prompt": (params(bad_words=[[SECOND, 3, THIRD, 5, BEST]]), None),
    "min_tokens before top-k": (
        params(min_tokens=9, end_id=BEST, top_k=4),
        swapped("min_tokens", "top_k"),
    ),
    "penalties before top-k": (params(presence_penalty=2.0, top_k=4), swapped("penalties", "top_k")),
    "biases": (params(logit_bias={BEST: -3.0, 17: 4.0, 0: 0.5}), params(logit_bias={BEST: -3.0})),
    "biases before temperature": (
        params(logit_bias={17: 4.0, 3: -2.0}, temperature=2.5),
        swapped("biases", "temperature"),
    ),
    "biases before penalties": (
        params(logit_bias={SECOND: 2.0}, repetition_penalty=1.8),
        swapped("biases", "penalties"),
    ),
    "biases before top-k": (params(logit_bias={17: 5.0, BEST: -5.0}, top_k=5), swapped("biases", "top_k")),
    "a bias does not lift a bad word": (params(logit_bias={4: 50.0}, bad_words=[[4]]), None),
    "allowed ids": (params(allowed_token_ids=[SECOND, 0, 5, 23, 17, 5]), params()),
    "allowed ids before top-k": (
        params(allowed_token_ids=[SECOND, 0, 5, 23, 17, 8, 9], top_k=3),
        swapped("allowed ids", "top_k"),
    ),
    "a bias on an id that is not allowed": (
        params(allowed_token_ids=[SECOND, THIRD, 3], logit_bias={BEST: 9.0, 3: 2.0}),
        None,
    ),
    "n-grams of 1": (params(no_repeat_ngram_size=1), params()),
    "n-grams of 2": (params(no_repeat_ngram_size=2), None),
    "n-grams longer than the history": (params(no_repeat_ngram_size=9), None),
    "n-grams before top-k": (params(no_repeat_ngram_size=1, top_k=4), swapped("n-grams", "top_k")),
    "typical-p": (params(typical_p=0.5), params(top_p=0.5)),
    "typical-p that drops the likeliest": (params(typical_p=0.3), params(typical_p=0.6)),
    "typical-p after temperature": (
        params(typical_p=0.4, temperature=2.5),
        swapped("typical_p", "temperature"),
    ),
    "typical-p after top-k": (params(typical_p=0.6, top_k=6), swapped("typical_p", "top_k")),
    "typical-p after top-p": (params(typical_p=0.6, top_p=0.8), swapped("typical_p", "top_p")),
    "typical-p after min-p": (params(typical_p=0.6, min_p=0.1), swapped("typical_p", "min_p")),
    "everything": (
        params(
            logit_bias={BEST: -1.0, 9: 1.5}, no_repeat_ngram_size=2, typical_p=0.9,
            bad_words=[[2], [THIRD, 5, 6]], temperature=1.4, repetition_penalty=1.3, presence_penalty=0.6,
            frequency_penalty=0.3, min_tokens=5, end_id=BEST, top_k=12, top_p=0.85,
        ),
        swapped("penalties", "top_p"),
    ),
}  # fmt: skip


DRAWN = {name: (right, wrong) for name, (right, wrong) in CASES.items() if wrong is not None}


@pytest.fixture(scope="module")
def reference_counts() -> dict[str, np.ndarray]:
    place = Place(Reference(), torch.device("cpu"), torch.Generator())
    return dict(zip(DRAWN, counts_of(place, [right for right, _ in DRAWN.values()])))


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_exact_probabilities(reference_counts: dict[str, np.ndarray], name: str):
    right, wrong = DRAWN[name]
    counts = reference_counts[name]
    assert misfit(counts, exact(right)) < 1
    other = exact(wrong) if isinstance(wrong, SamplingParams) else exact(right, order=wrong)
    assert misfit(counts, other) > 1, "the draws cannot tell the rule from its mistake"


@pytest.mark.gpu
def test_draws_of_the_kernel_have_the_exact_probabilities(cuda_place: Place):
    counts = counts_of(cuda_place, [right for right, _ in CASES.values()])
    for name, found in zip(CASES, counts):
        assert misfit(found, exact(CASES[name][0])) < 1, name


class _Penalties(LogitsProcessor):
    """Presence and frequency penalties by OpenAI's definition; transformers has none."""

    def __init__(self, given: SamplingParams):
        self.given = given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0], minlength=scores.shape[1])
        presence = self.given.presence_penalty * (counts > 0)
        return scores - presence - self.given.frequency_penalty * counts


def processors(given: SamplingParams) -> LogitsProcessorList:
    """Return transformers' processors for the parameters, in FasterTransformer's order."""
    found: list = []
    if given.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[id], bias] for id, bias in given.logit_bias.items()]))
    if given.allowed_token_ids:
        found.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: given.allowed_token_ids, 1))
    if given.no_repeat_ngram_size:
        found.append(NoRepeatNGramLogitsProcessor(given.no_repeat_ngram_size))
    if given.bad_words:
        found.append(NoBadWordsLogitsProcessor(given.bad_words))
    found.append(TemperatureLogitsWarper(given.temperature))
    found += [RepetitionPenaltyLogitsProcessor(given.repetition_penalty), _Penalties(given)]
    if given.min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), given.min_tokens, given.end_ids))
    if given.min_p:
        found.append(MinPLogitsWarper(given.min_p))
    if given.top_k:
        found.append(TopKLogitsWarper(given.top_k))
    if given.top_p < 1:
        found.append(TopPLogitsWarper(given.top_p))
    if given.typical_p < 1:
        found.append(TypicalLogitsWarper(given.typical_p))
    return LogitsProcessorList(found)


@pytest.mark.parametrize("name", CASES)
def test_the_exact_probabilities_are_those_of_transformers_processors(name: str):
    given, _ = CASES[name]
    scores = torch.from_numpy(LOGITS.astype(np.float64))[None]
    scores = processors(given)(torch.tensor([PROMPT + OUTPUT]), scores)
    assert exact(given) == pytest.approx(scores[0].softmax(-1).numpy(), abs=1e-8)


@pytest.mark.parametrize("top_k", [0, 3, 9])
@pytest.mark.parametrize("min_p", [0.02, 0.2])
def test_min_p_and_top_k_keep_the_same_ids_in_either_order(top_k: int, min_p: float):
    """transformers applies min-p last: without top-p that is the same."""
    given = params(min_p=min_p, top_k=top_k, temperature=1.5)
    assert np.array_equal(exact(given), exact(given, order=swapped("min_p", "top_k")))
    warpers = [TemperatureLogitsWarper(1.5), *([TopKLogitsWarper(top_k)] if top_k else [])]
    scores = torch.from_numpy(LOGITS.astype(np.float64))[None]
    scores = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(torch.tensor([PROMPT]), scores)
    assert exact(given) == pytest.approx(scores[0].softmax(-1).numpy(), abs=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_of_the_whole_vocabulary_after_temperature_and_penalties(place: Place, name: str):
    given, _ = CASES[name]
    wanted = exact(given, order=ORDER[: ORDER.index("min_p")])
    values = {field: getattr(given, field) for field in given.__struct_fields__}
    cases = [SamplingParams(**{**values, "seed": seed, "return_log_probs": True}) for seed in range(16)]
    tokens, log_probs = sample(place, make_state(place, cases), list(range(16)))
    assert log_probs == pytest.approx(np.log(wanted[tokens]).tolist(), abs=2e-5)


def test_greedy_takes_the_likeliest_under_every_rule(place: Place):
    for given, _ in CASES.values():
        values = {field: getattr(given, field) for field in given.__struct_fields__}
        greedy = [SamplingParams(**{**values, "top_k": 1}), SamplingParams(**{**values, "temperature": 0.0})]
        tokens, _ = sample(place, make_state(place, greedy), [0, 1])
        free = {**values, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}
        warm, cold = exact(SamplingParams(**free)), exact(SamplingParams(**{**free, "temperature": 1.0}))
        assert tokens == [int(warm.argmax()), int(cold.argmax())]


# ---------------------------------------------------------------- factual nucleus


def test_a_decaying_top_p_shrinks_the_nucleus_and_a_reset_id_restores_it(place: Place):
    """The second token comes from the nucleus of 0.9 * 0.5, or of 0.9 after the reset id."""
    reset = SECOND
    given = params(top_p=0.9, top_p_decay=0.5, top_p_min=0.1, top_p_reset_id=reset)
    counts = {True: np.zeros(VOCAB), False: np.zeros(VOCAB)}
    for first in range(0, 640, BATCH):
        state = make_state(place, [seeded(given, first + i) for i in range(BATCH)])
        firsts, _ = sample(place, state, list(range(BATCH)))
        for one, two in zip(firsts, sample(place, state, list(range(BATCH)))[0]):
            counts[one == reset][two] += 1
    whole, half = exact(params(top_p=0.9)), exact(params(top_p=0.45))
    assert misfit(counts[True], whole) < 1 < misfit(counts[True], half)
    assert misfit(counts[False], half) < 1 < misfit(counts[False], whole)


@pytest.mark.parametrize(
    ("decay", "least", "steps", "wanted"),
    [
        (1.0, 1e-6, 5, 0.9),  # the defaults: no decay
        (0.5, 1e-6, 3, 0.9 * 0.125),
        (0.5, 0.3, 5, 0.3),  # never below the minimum
        (1e-4, 1e-6, 3, 1e-6),
    ],
)
def test_top_p_decays_to_its_minimum(place: Place, decay: float, least: float, steps: int, wanted: float):
    state = make_state(place, [params(top_p=0.9, top_p_decay=decay, top_p_min=least)])
    for _ in range(steps):
        sample(place, state, [0])
    assert float(state.column("top_p_now")[0]) == pytest.approx(wanted, rel=1e-5)


def test_counts_follow_the_generated_tokens(place: Place):
    """A token is penalised from the step after its draw on."""
    given = params(frequency_penalty=1.5, top_k=1)
    state, output = make_state(place, [given]), list(OUTPUT)
    for _ in range(12):
        (token,), _ = sample(place, state, [0])
        assert token == int(exact(params(frequency_penalty=1.5), output=output).argmax())
        output.append(token)
    assert 4 < len(set(output)) < len(output)
