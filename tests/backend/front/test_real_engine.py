"""The service alone before the real engine on the CPU: its texts are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.backend.front.fronts import Front, joined
from tests.checkpoints import greedy
from tests.reliability.service import build_repository
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes

PROMPT = "the ferry leaves at seven"
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("real")
    build_repository(made)
    return made


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    with Front(folder / "repo", folder / "front.log") as front:
        yield front
    wait_until(lambda: not processes_of(folder), 30, "the end of supervisor and rank")


def processes_of(folder: Path) -> list[int]:
    lines = {pid: processes.command_line(pid) or [] for pid in processes.all_pids()}
    return [pid for pid, words in lines.items() if any(str(folder) in word for word in words)]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[list[int], str, torch.Tensor]:
    """transformers' ids of the prompt, its greedy text, and the log probabilities of its tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    prompt = tokenizer.encode(PROMPT).ids
    tokens, logits = greedy(model, prompt, COUNT)
    text = tokenizer.decode(prompt + tokens)[len(PROMPT) :]
    return prompt, text, logits.log_softmax(-1)[torch.arange(COUNT), torch.tensor(tokens)]


def test_greedy_texts_are_those_of_transformers(front: Front, wanted: tuple) -> None:
    prompt, text, log_probs = wanted
    asked = {"model": "hf", "max_tokens": COUNT, "temperature": 0, "logprobs": 1}
    for given in (PROMPT, prompt):
        found = front.openai.completions.create(prompt=given, **asked)
        assert found.choices[0].text == text
        assert found.usage.prompt_tokens == len(prompt) and found.usage.completion_tokens == COUNT
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(log_probs.tolist(), abs=1e-4)
    chunks = list(front.openai.completions.create(prompt=PROMPT, stream=True, **asked))
    assert joined(chunks) == text


def test_a_prompt_that_was_seen_is_not_computed_again(front: Front, wanted: tuple) -> None:
    """Blocks have 32 tokens. The salt separates this test from all others."""
    prompt = [wanted[0][i % len(wanted[0])] for i in range(70)]

    def ask(**fields) -> tuple[str, int]:
        body = {"model": "hf", "prompt": prompt, "max_tokens": 6, "temperature": 0, **fields}
        found = front.openai.completions.create(
            extra_body={name: body.pop(name) for name in ("cache", "cache_salt") if name in body}, **body
        )
        return found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens

    text, cached = ask(cache_salt="this test")
    assert cached == 0
    assert ask(cache_salt="this test") == (text, 64)
    assert ask(cache_salt="this test", cache="off") == (text, 0)
    assert ask(cache_salt="this test", cache="write") == (text, 0)
    assert ask(cache_salt="this test, another") == (text, 0)


def test_samples_of_a_seed_are_the_same_each_time(front: Front) -> None:
    asked = {"model": "hf", "prompt": PROMPT, "max_tokens": 16, "seed": 11, "n": 3}
    first, second = (front.openai.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3


def test_the_best_of_several_samples_has_the_highest_log_probability(front: Front) -> None:
    asked = {"model": "hf", "prompt": PROMPT, "max_tokens": 8, "seed": 5, "logprobs": 0}
    every = front.openai.completions.create(n=4, **asked).choices
    best = front.openai.completions.create(best_of=4, n=1, **asked)
    means = [sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in every]
    assert best.choices[0].text == every[means.index(max(means))].text
    assert best.usage.completion_tokens == 32 and len(best.choices) == 1


def test_log_probabilities_of_the_prompt_are_those_of_transformers(front: Front, folder: Path) -> None:
    """lm-eval scores its items so: echo, log probabilities, and a token that it does not look at."""
    tokenizer = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, "and returns")]
    for count in (1, 0):
        found = front.openai.completions.create(
            model="hf", prompt=prompts, max_tokens=count, temperature=0, echo=True, logprobs=2
        )
        for prompt, choice in zip(prompts, found.choices):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            wanted = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            logprobs = choice.logprobs
            assert logprobs.token_logprobs[0] is None
            assert logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)
            assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(prompt) + count
            best = logits[:-1].max(-1).values.tolist()
            tops = [max(top.values()) for top in logprobs.top_logprobs[1 : len(prompt)]]
            assert tops == pytest.approx(best, abs=1e-4)


def test_prompt_logprobs_are_those_of_transformers(front: Front, folder: Path) -> None:
    """vLLM's field, of completions with several prompts and samples, and of a chat."""
    tokenizer = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)

    def check(ids: list[int], found: list) -> None:
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert found[0] is None and len(found) == len(ids)
        for token, row, one in zip(ids[1:], wanted, found[1:]):
            best = row.topk(2).indices.tolist()
            assert list(one) == [str(other) for other in dict.fromkeys([token, *best])]
            for other, entry in one.items():
                assert entry["logprob"] == pytest.approx(float(row[int(other)]), abs=1e-4)
                assert entry["rank"] == int((row >= row[int(other)]).sum())

    asked = {"model": "hf", "max_tokens": 3, "seed": 1, "extra_body": {"prompt_logprobs": 2}}
    prompts = [PROMPT, "and returns at nine"]
    found = front.openai.completions.create(prompt=prompts, n=2, **asked)
    for choice in found.choices:
        check(tokenizer.encode(prompts[choice.index // 2]).ids, choice.prompt_logprobs)
    plain = front.openai.completions.create(model="hf", prompt=PROMPT, max_tokens=1)
    assert not hasattr(plain.choices[0], "prompt_logprobs")


@pytest.mark.parametrize("count", [6, 0])
def test_a_streamed_echo_has_the_log_probabilities_of_a_whole_one(front: Front, count: int) -> None:
    asked = {
        "model": "hf",
        "prompt": [PROMPT, "and returns at nine", "x"],
        "max_tokens": count,
        "seed": 3,
        "n": 2,
        "echo": True,
        "logprobs": 2,
    }
    whole = front.openai.completions.create(**asked)
    texts, parts = [""] * 6, [[] for _ in range(6)]  # parts: each row's log probabilities
    ends = {}
    for chunk in front.openai.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            parts[choice.index].append(choice.logprobs)
            ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.text and ends[choice.index] == choice.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            found = [value for part in parts[choice.index] for value in getattr(part, name)]
            wanted = getattr(choice.logprobs, name)
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted):
                assert one == pytest.approx(other, abs=1e-4) if one is not None else other is None


def test_embeddings_are_transformers_hidden_states_after_the_final_norm(front: Front, folder: Path) -> None:
    """A stream runs at the same time, and an input is longer than a step of 512 tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    texts = [PROMPT, "and returns", "the ferry " * 90, "x"]
    asked = {"model": "hf", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
    with front.openai.completions.create(**asked) as stream:
        next(iter(stream))
        found = front.openai.embeddings.create(model="hf", input=texts)
        means = front.openai.embeddings.create(model="hf", input=texts, extra_body={"pooling": "mean"})
    prompts = [tokenizer.encode(text).ids for text in texts]
    assert len(prompts[2]) > 512 and found.usage.prompt_tokens == sum(map(len, prompts))
    for prompt, one, mean in zip(prompts, found.data, means.data):
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), output_hidden_states=True)
        states = out.hidden_states[-1][0].double()
        for vector, wanted in ((one.embedding, states[-1]), (mean.embedding, states.mean(0))):
            assert vector == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)


def test_the_ids_of_the_generate_route_are_transformers(front: Front, folder: Path, wanted: tuple) -> None:
    prompt, text, _ = wanted
    asked = {"token_ids": prompt, "sampling_params": {"max_tokens": COUNT, "temperature": 0}}
    tokens = front.post("/inference/v1/generate", asked).json()["choices"][0]["token_ids"]
    tokenizer = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    assert tokenizer.decode(prompt + tokens)[len(PROMPT) :] == text
