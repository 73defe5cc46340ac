"""Prompt learning in the engine: soft prompts, p-tuning and prefixes of requests, compared with transformers'
inputs_embeds and with a cache that begins with the prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.toy_device import VOCAB, Run, ToyDevice, limits, next_token
from tests.checkpoints import FAMILIES
from tests.prompt_adapters import greedy_embedded, greedy_prefixed, prefix, soft
from tridecode.backend.base.errors import CapacityError, RequestError, TridecodeError
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, SessionRound, Submit
from tridecode.backend.wire.prompt_learning import LearnedPrompt, PromptLimits, PromptTask

TOKENS = 5
#: its reference (converters/references/baichuan.py) takes neither embeddings nor a cache
WITH_CACHE = [name for name in FAMILIES if name != "baichuan"]


def random_table(rows: int, width: int, seed: int = 3, scale: float = 0.5) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def random_prefix(offline, rows: int, seed: int = 4) -> torch.Tensor:
    model = offline.model_config
    shape = (model.num_layers, 2, model.num_kv_heads, model.head_size)
    return random_table(rows, int(np.prod(shape)), seed).view(rows, *shape)


def agree(generation, wanted: tuple[list[int], np.ndarray]) -> None:
    tokens, logits = wanted
    assert generation.tokens == tokens
    assert np.abs(np.stack(generation.logits) - logits).max() < fp32_bound(logits)


def ask(offline, prompt: list[int], learned: LearnedPrompt | None = None, **params) -> int:
    return offline.submit(prompt, SamplingParams(**{"max_tokens": TOKENS, **params}), "", learned)


def mixed_batch(offline, model) -> list[tuple[int, tuple[list[int], np.ndarray]]]:
    """Requests of every kind, longer and shorter than a step: (number, what transformers says)."""
    vocab, width = model.config.vocab_size, offline.model_config.hidden_size
    first, second, third = prompts_of([11, 3, 20], vocab, seed=1)
    table, other, cached = random_table(6, width), random_table(9, width, 7), random_prefix(offline, 9)
    between = [vocab, vocab + 1, vocab + 2, *first[:7], vocab + 5, *first[7:]]
    before = [*range(vocab, vocab + 9), *second]
    behind = [*range(vocab, vocab + 9), *third]
    return [
        (ask(offline, between, soft(table)), greedy_embedded(model, between, table, vocab, TOKENS)),
        (ask(offline, behind, prefix(cached)), greedy_prefixed(model, third, cached, TOKENS)),
        (ask(offline, third), hf_greedy(model, third, TOKENS)),
        (ask(offline, before, soft(other)), greedy_embedded(model, before, other, vocab, TOKENS)),
        (ask(offline, [*behind[:9], second[0]], prefix(cached)),
         greedy_prefixed(model, second[:1], cached, TOKENS)),
    ]  # fmt: skip


@pytest.mark.parametrize("family", WITH_CACHE)
def test_one_batch_of_every_kind_gives_what_transformers_gives(family: str) -> None:
    model = FAMILIES[family]()
    offline = offline_engine(model)
    asked = mixed_batch(offline, model)
    offline.run()
    for number, wanted in asked:
        agree(offline.generations[number], wanted)
    ask(offline, [1])
    offline.run()
    assert offline.engine.state.prompts.numbers == []  # the next plan drops what has ended


def test_virtual_tokens_are_rows_of_a_longer_embedding() -> None:
    """Baichuan, whose reference takes ids only: it gets the table as further rows of its vocabulary."""
    model = FAMILIES["baichuan"]()
    offline, vocab = offline_engine(model), model.config.vocab_size
    table = random_table(4, offline.model_config.hidden_size)
    prompt = [vocab + 1, *prompts_of([6], vocab)[0], vocab + 3, 5]
    number = ask(offline, prompt, soft(table), max_tokens=1)
    offline.run()
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(torch.cat([embedding.weight, table]))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].numpy()
    agree(offline.generations[number], ([int(logits.argmax())], logits[None]))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "gemma2"])
def test_a_preempted_sequence_is_computed_again_from_its_table(family: str) -> None:
    model = FAMILIES[family]()
    offline = offline_engine(model)
    block = offline.engine.state.block_bytes() // 2
    offline = offline_engine(model, cache_bytes=12 * block, block_tokens=4)
    asked = mixed_batch(offline, model)
    offline.run()
    assert offline.scheduler.counters.preemptions
    for number, wanted in asked:
        agree(offline.generations[number], wanted)


def test_penalties_and_bad_words_know_no_virtual_tokens() -> None:
    """A prompt of the same embeddings has no ids either: the penalty of id 0 does not change."""
    model = FAMILIES["llama"]()
    offline, vocab = offline_engine(model), model.config.vocab_size
    prompt = prompts_of([6], vocab, seed=5)[0]
    rows = model.get_input_embeddings().weight[prompt[:3]].detach()
    virtual = [vocab, vocab + 1, vocab + 2, *prompt[3:]]
    free, _ = hf_greedy(model, prompt, 1)
    banned = [[prompt[5], free[0]], [prompt[2], free[0]]]  # the second: behind a virtual token, never matches
    for bad_words in ([banned[0]], []):
        one = ask(offline, virtual, soft(rows), repetition_penalty=3.0, bad_words=bad_words)
        offline.run()
        seen = set(prompt[3:])
        logits = offline.generations[one].logits[0].copy()
        for token in seen:
            logits[token] *= 3.0 if logits[token] < 0 else 1 / 3.0
        if bad_words:
            logits[free[0]] = -np.inf
        assert offline.generations[one].tokens[0] == int(logits.argmax())


@torch.inference_mode()
def test_logits_and_the_log_prob_of_a_prompt_are_of_tokens_with_ids() -> None:
    model = FAMILIES["llama"]()
    offline, vocab = offline_engine(model), model.config.vocab_size
    table, ids = random_table(3, offline.model_config.hidden_size), prompts_of([22], vocab, seed=8)[0]
    prompt = [vocab, vocab + 1, *ids[:18], vocab + 2, *ids[18:]]
    learned = soft(table)
    number = ask(offline, prompt, learned, return_context_logits=True, return_context_log_prob=True)
    offline.run()
    found, embedding = torch.tensor(prompt), model.get_input_embeddings()
    embedded = embedding(found.where(found < vocab, 0)).clone()
    embedded[found >= vocab] = table[found[found >= vocab] - vocab]
    logits = model(inputs_embeds=embedded[None]).logits[0]
    generation = offline.generations[number]
    shown = np.frombuffer(generation.context_logits, np.float32).reshape(-1, vocab)
    assert np.abs(shown - logits[found < vocab].numpy()).max() < fp32_bound(shown)
    targets = found[1:]
    each = logits[:-1].log_softmax(-1).gather(1, targets.where(targets < vocab, 0)[:, None])[:, 0]
    assert generation.context_log_prob == pytest.approx(float(each[targets < vocab].sum()), abs=1e-3)


def beams_of(generation) -> list[list[int]]:
    return [one.tokens for one in generation.sequences]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("settings", [{"beam_width": 3}, {"num_return_sequences": 2, "top_k": 20, "seed": 5}])
def test_beams_and_samples_of_a_table_equal_those_of_the_tokens_it_stands_for(family: str, settings) -> None:
    """Rows that are embeddings of tokens, and transformers' own keys and values of these tokens, in a cache
    where groups are preempted."""
    model = FAMILIES[family]()
    block = offline_engine(model).engine.state.block_bytes() // 2
    size = {"cache_bytes": 26 * block, "block_tokens": 4, "max_sequences": 12, "keep_logits": False}
    offline, vocab = offline_engine(model, **size), model.config.vocab_size
    ids = prompts_of([17], vocab, seed=6)[0]
    rows = model.get_input_embeddings()(torch.tensor(ids[:6]))
    cache = model(torch.tensor([ids[:6]]), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]  # (2, K, 6, D)
    cached = torch.stack(layers).permute(3, 0, 1, 2, 4).contiguous()
    virtual = [*range(vocab, vocab + 6), *ids[6:]]
    forms = ((ids, None), (virtual, soft(rows)), (virtual, prefix(cached)))
    numbers = [ask(offline, prompt, learned, max_tokens=12, **settings) for prompt, learned in forms]
    penalised = [
        ask(offline, prompt, learned, max_tokens=12, repetition_penalty=1.3, **settings)
        for prompt, learned in forms[1:]
    ]
    offline.run()
    plain, embedded, prefixed = (beams_of(offline.generations[number]) for number in numbers)
    assert plain == embedded == prefixed and len(plain) > 1
    first, second = (beams_of(offline.generations[number]) for number in penalised)
    assert first == second  # neither counts the virtual tokens
    if "beam_width" in settings:
        assert offline.scheduler.counters.preemptions


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_16_bit_engines_take_tables_of_16_and_32_bits(data_type: str) -> None:
    model = FAMILIES["gpt2"]()
    offline, vocab = offline_engine(model, data_type=data_type), model.config.vocab_size
    table = random_table(4, offline.model_config.hidden_size)
    prompt = [*range(vocab, vocab + 4), *prompts_of([7], vocab)[0]]
    numbers = [ask(offline, prompt, soft(table, dtype), max_tokens=1) for dtype in ("fp16", "fp32")]
    offline.run()
    _, wanted = greedy_embedded(model, prompt, table, vocab, 1)
    for number in numbers:
        error = np.abs(offline.generations[number].logits[0] - wanted[0]).max()
        assert error < 0.05 * np.abs(wanted).max()


def test_values_that_overflow_end_one_request_alone() -> None:
    """A table of huge values makes an fp16 model compute infinities; the next request on the same blocks of
    the cache does not read them."""
    model = FAMILIES["gpt2"]()
    block = offline_engine(model, data_type="fp16").engine.state.block_bytes()
    offline = offline_engine(model, data_type="fp16", cache_bytes=5 * block)
    vocab = model.config.vocab_size
    plain = prompts_of([2], vocab)[0]
    first = ask(offline, plain)
    offline.run()
    huge = random_table(4, offline.model_config.hidden_size).sign() * 65504
    ask(offline, [*range(vocab, vocab + 4), 1, 2, 3], soft(huge))
    with pytest.raises(TridecodeError, match="logits are not numbers"):
        offline.run()
    assert not all(cache.blocks.isfinite().all() for cache in offline.engine.state.caches)
    again = ask(offline, plain)
    offline.run()
    assert all(cache.blocks.isfinite().all() for cache in offline.engine.state.caches)
    assert offline.generations[again].tokens == offline.generations[first].tokens
    assert np.array_equal(offline.generations[again].logits, offline.generations[first].logits)


# ---------------------------------------------------------------- the plans


class PromptDevice(ToyDevice):
    """A toy device with tables: row i of table n, an embedding or key and value, is the id 1000 n + i + 500.
    Uploads are kept as the ranks keep them, and each plan goes through its frame."""

    def __init__(self, limits) -> None:
        super().__init__(limits)
        self.tables: dict[int, int] = {0: 3, 1: 5}  # number -> rows; two tasks
        self.uploads = 0

    def run(self, plan: StepPlan) -> StepResult:
        sequences, plan = plan.sequences, plan_frame.decode(plan_frame.encode(plan))
        plan.sequences = sequences
        if plan.part(PromptTables) is not None:
            self._prepare(plan)
        return super().run(plan)

    def _prepare(self, plan: StepPlan) -> None:
        prompts = plan.part(PromptTables).tables
        for number in prompts.dropped:
            del self.tables[number]
        self.cache[prompts.cleared] = -7
        for upload in prompts.uploads:
            assert upload.number not in self.tables, "a table is sent twice"
            self.tables[upload.number] = upload.rows
            self.uploads += 1
        for copy in prompts.prefixes:
            rows = self.tables[copy.number]
            places = np.arange(rows)
            blocks = np.array(copy.blocks)[places // self.limits.block_tokens]
            self.cache[blocks, places % self.limits.block_tokens] = 1000 * copy.number + 500 + places
            self.shifts[blocks, places % self.limits.block_tokens] = 0
        token_ids = plan.token_ids.copy()
        for virtual in prompts.virtual:
            tokens, rows = virtual.indices()
            assert (token_ids[tokens] == 0).all() and (rows < self.tables[virtual.number]).all()
            token_ids[tokens] = 1000 * virtual.number + 500 + rows
        plan.token_ids = token_ids


def toy_run(overlap: bool, **changes) -> Run:
    run = Run(limits(**changes), overlap)
    tasks = [PromptTask("a", 3, 3), PromptTask("b", 5, 2)]
    book = PromptBook(PromptLimits(3, VOCAB, tasks, prefix_size=4), hidden=2, vocab=VOCAB, max_bytes=400)
    run.scheduler = Scheduler(run.scheduler.limits, lambda: run.now, None, book)
    run.device = PromptDevice(run.scheduler.limits)
    return run


def toy_submit(run: Run, request: int, prompt: list[int], learned: LearnedPrompt | None, count: int) -> None:
    sequence = SequenceRequest(
        np.array(prompt, np.int32).tobytes(), SamplingParams(max_tokens=count), "", learned
    )
    run.scheduler.submit(b"door", Submit(request, [sequence]))


def toy_answer(prompt: list[int], number: int, count: int) -> list[int]:
    seen = [1000 * number + 500 + token - VOCAB if token >= VOCAB else token for token in prompt]
    found: list[int] = []
    for generated in range(count):
        found.append(next_token([*seen, *found], 0, generated))
    return found


@pytest.mark.parametrize("overlap", [False, True, "stages"])
def test_tables_are_sent_once_and_dropped_at_the_end(overlap: bool) -> None:
    """Tasks, tables of requests and plain requests, in a cache so small that sequences are preempted."""
    run = toy_run(overlap, num_blocks=9)
    head = [VOCAB + i for i in range(5)]
    table = LearnedPrompt(rows=2, values=bytes(2 * 2 * 2))
    cached = LearnedPrompt(is_prefix=True, rows=5, values=bytes(5 * 4 * 2))
    asked = [
        ([4, VOCAB + 1, 5, VOCAB, 6], table, 2),
        ([*head, 1, 2], LearnedPrompt(task=1), 1),
        ([*head, *range(12)], cached, 3),
        ([7, 8], None, 0),
        ([VOCAB + 2, 3], LearnedPrompt(task=0), 0),
        ([*head, 9], cached, 4),
    ]
    for request, (prompt, learned, _) in enumerate(asked):
        toy_submit(run, request, prompt, learned, 12)
    run.finish()
    assert run.scheduler.counters.preemptions
    for request, (prompt, _, number) in enumerate(asked):
        assert run.tokens[request, 0] == toy_answer(prompt, number, 12), request
    toy_submit(run, 90, [1], None, 1)
    run.finish()
    assert run.device.uploads == 3 and set(run.device.tables) == {0, 1}
    assert run.scheduler.prompts._open_bytes == 0


def test_a_cancelled_request_leaves_no_table() -> None:
    run = toy_run(overlap=True)
    table = LearnedPrompt(rows=1, values=bytes(4))
    for request in range(9):
        toy_submit(run, request, [VOCAB, 2, 3], table, 9)
    run.step()
    for request in (0, 8):  # one that runs, one that waits and was never sent
        run.scheduler.cancel(b"door", request)
    run.finish()
    toy_submit(run, 90, [1], None, 1)
    run.finish()
    assert set(run.device.tables) == {0, 1} and run.device.uploads == 8
    assert run.scheduler.prompts._open_bytes == 0


def test_a_session_takes_no_table() -> None:
    run, ids = toy_run(overlap=False), np.array([VOCAB, 1], np.int32).tobytes()
    round_ = Submit(1, [SequenceRequest(ids, learned=LearnedPrompt(task=0))], session=SessionRound(1, 30))
    with pytest.raises(RequestError, match="virtual tokens and is a round of a session"):
        run.scheduler.submit(b"door", round_)
    assert not run.scheduler.has_work


REFUSED = {
    "a task that is not there": ([1], LearnedPrompt(task=2), "the prompt's task is 2; this model has 2"),
    "a row that is not there": ([VOCAB + 3, 1], LearnedPrompt(task=0), f"token id {VOCAB + 3}"),
    "a virtual id without a table": ([VOCAB, 1], None, f"token id {VOCAB}"),
    "an announced size": ([1], LearnedPrompt(rows=3, values=bytes(8)), "wanted 3 rows of 2 values"),
    "a dtype": ([1], LearnedPrompt(rows=2, dtype="int8", values=bytes(8)), "no prompt table of int8"),
    "a value": ([1], LearnedPrompt(rows=1, values=b"\x00\x00\x00\x7c"), "the value inf in row 0"),
    "no token behind a prefix": ([VOCAB + i for i in range(5)], LearnedPrompt(task=1), "no token after"),
    "half a prefix": ([VOCAB, VOCAB + 1, 3, 4, 5, 6], LearnedPrompt(task=1), "does not begin"),
    "a table for ever too large": (
        [1], LearnedPrompt(rows=101, values=bytes(404)), "404 bytes of prompt tables; this model accepts 400"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_engine_does_not_rely_on_the_doors_checks(case: str) -> None:
    run = toy_run(overlap=False)
    prompt, learned, told = REFUSED[case]
    with pytest.raises(RequestError, match=told):
        toy_submit(run, 1, prompt, learned, 3)
    assert not run.scheduler.has_work and run.scheduler.prompts._open_bytes == 0


def test_tables_beyond_the_limit_wait_at_the_client() -> None:
    run = toy_run(overlap=False)
    toy_submit(run, 1, [VOCAB, 1], LearnedPrompt(rows=75, values=bytes(300)), 3)
    with pytest.raises(CapacityError, match="have 300 bytes of prompt tables and this one has 200 more"):
        toy_submit(run, 2, [VOCAB, 1], LearnedPrompt(rows=50, values=bytes(200)), 3)
    run.finish()
    toy_submit(run, 2, [VOCAB, 1], LearnedPrompt(rows=50, values=bytes(200)), 3)
    run.finish()


@pytest.mark.parametrize("damage", ["bytes", "token", "rows"])
def test_a_damaged_frame_is_told(damage: str) -> None:
    run = toy_run(overlap=False)
    toy_submit(run, 1, [VOCAB, 1], LearnedPrompt(rows=2, values=bytes(8)), 3)
    plan = run.scheduler.plan()
    tables = plan.part(PromptTables).tables
    virtual, upload = tables.virtual[0], tables.uploads[0]
    if damage == "bytes":
        tables.uploads = [type(upload)(5, False, 3, "fp16", bytes(8))]
    elif damage == "token":
        tables.virtual = [type(virtual).of(2, np.array([2]), np.array([0]))]
    else:
        tables.virtual = [type(virtual)(2, bytes(8), bytes(4))]
    with pytest.raises(TridecodeError, match="from rank 0"):
        plan_frame.decode(plan_frame.encode(plan))
