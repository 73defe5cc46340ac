"""`LLM` over a real engine on the CPU: texts, ids and log probabilities are transformers'."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import greedy
from tests.tools.llm.models import PROMPTS, tiny_checkpoint
from tests.waiting import wait_until
from tridecode import LLM, BeamSearchParams, PoolingParams, SamplingParams
from tridecode.backend.base.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def llm(checkpoint, cache, tmp_path_factory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        with LLM(str(checkpoint), cache=cache, max_num_seqs=4) as llm:
            yield llm


@pytest.fixture(scope="module")
def repository(llm, cache) -> Path:
    (entry,) = cache.glob("tiny-*")
    return entry


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)


def test_greedy_answers_are_those_of_transformers_in_the_order_of_the_prompts(llm, reference) -> None:
    model, tokenizer = reference
    found = llm.generate(PROMPTS * 5, GREEDY)  # more than four sequences
    assert [one.prompt for one in found] == PROMPTS * 5
    for one in found:
        assert one.prompt_token_ids == tokenizer(one.prompt).input_ids
        tokens, _ = greedy(model, one.prompt_token_ids, 8)
        (answer,) = one.outputs
        assert answer.token_ids == tokens and answer.finish_reason == "length" and one.finished
        assert answer.logprobs is None and answer.cumulative_logprob is None


def test_a_prompt_is_a_text_ids_or_vllms_dict(llm) -> None:
    ids = llm.encode(PROMPTS[0])
    wanted = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    for prompt in (ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, [PROMPTS[0]], [ids]):
        (found,) = llm.generate(prompt, GREEDY)
        assert found.outputs[0].token_ids == wanted
    assert llm.decode(ids).endswith(PROMPTS[0])


def test_each_prompt_may_have_parameters_of_its_own(llm) -> None:
    lengths = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 2)]
    found = llm.generate(PROMPTS[:3], lengths)
    assert [len(one.outputs[0].token_ids) for one in found] == [1, 5, 2]
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts; wanted one, or one for each"):
        llm.generate(PROMPTS[:2], lengths)


def test_log_probs_are_those_of_transformers(llm, reference) -> None:
    model, tokenizer = reference
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    (found,) = llm.generate(PROMPTS[0], params)
    answer = found.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([found.prompt_token_ids + answer.token_ids])).logits[0]
    steps = torch.log_softmax(logits[len(found.prompt_token_ids) - 1 : -1].double(), -1)
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    for step, token, entries in zip(steps, answer.token_ids, answer.logprobs):
        best = step.topk(3).indices.tolist()
        assert list(entries) == best and token == best[0]
        assert [one.rank for one in entries.values()] == [1, 2, 3]
        for other, one in entries.items():
            assert one.logprob == pytest.approx(float(step[other]), abs=2e-4)
    total = sum(float(step[token]) for step, token in zip(steps, answer.token_ids))
    assert answer.cumulative_logprob == pytest.approx(total, abs=5e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_transformers(llm, reference, n) -> None:
    """Each entry has the most likely tokens and the prompt's own with its rank; the first is None."""
    model, tokenizer = reference
    params = SamplingParams(n=n, seed=1, prompt_logprobs=2, max_tokens=3, ignore_eos=True)
    found = llm.generate(PROMPTS * 2, params)  # the second time the prompts are in the cache
    for one in found:
        ids = one.prompt_token_ids
        with torch.no_grad():
            steps = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == len(ids)
        assert one.prompt_logprobs[0] is None
        for step, token, entries in zip(steps, ids[1:], one.prompt_logprobs[1:]):
            assert entries is not None
            best = step.topk(2).indices.tolist()
            assert list(entries) == list(dict.fromkeys([*best, token]))
            for other, entry in entries.items():
                assert entry.logprob == pytest.approx(float(step[other]), abs=2e-4)
                assert entry.rank == int((step >= step[other]).sum())
            text = tokenizer.decode([token])
            assert "\ufffd" in text or entries[token].decoded_token == text
        assert all(answer.logprobs is None and answer.cumulative_logprob is None for answer in one.outputs)


def test_best_of_returns_the_most_likely_answers(llm, reference) -> None:
    """The scores are transformers', for the answers that the same seed gives with n = 6."""
    model, _ = reference
    common = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    (every,) = llm.generate(PROMPTS[1], SamplingParams(n=6, **common))
    ids, scores = every.prompt_token_ids, []
    for answer in every.outputs:
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer.token_ids])).logits[0, len(ids) - 1 : -1]
        of_each = torch.log_softmax(logits.double(), -1)[range(len(answer.token_ids)), answer.token_ids]
        scores.append((float(of_each.sum()), answer.token_ids))
    wanted = [tokens for _, tokens in sorted(scores, reverse=True)]
    assert wanted != [answer.token_ids for answer in every.outputs]
    for n, logprobs in ((1, None), (3, 2)):
        params = SamplingParams(n=n, best_of=6, logprobs=logprobs, **common)
        (found,) = llm.generate(PROMPTS[1], params)
        assert [answer.token_ids for answer in found.outputs] == wanted[:n]
        assert [answer.index for answer in found.outputs] == list(range(n))
        for answer in found.outputs:
            assert (answer.logprobs is None) == (answer.cumulative_logprob is None) == (logprobs is None)
    with pytest.raises(RequestError, match="best_of chooses among whole answers"):
        next(iter(llm.stream(PROMPTS[1], SamplingParams(best_of=2))))


def test_samples_differ_and_a_seed_repeats_them(llm) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=6, ignore_eos=True)
    (first,), (second,) = llm.generate(PROMPTS[0], params), llm.generate(PROMPTS[0], params)
    texts = [answer.token_ids for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2] and len(set(map(tuple, texts))) > 1
    assert [answer.token_ids for answer in second.outputs] == texts
    single = SamplingParams(temperature=1.5, seed=8, max_tokens=6, ignore_eos=True)
    assert llm.generate(PROMPTS[0], single)[0].outputs[0].token_ids == texts[1]  # sample i: the seed plus i


def test_beams_are_those_of_transformers(llm, reference) -> None:
    model, _ = reference
    ids = llm.encode(PROMPTS[0])
    (found,) = llm.beam_search([ids], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    wanted = model.generate(
        torch.tensor([ids]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=1.0,
    )
    assert [answer.token_ids for answer in found.outputs] == wanted[:, len(ids) :].tolist()


def test_a_stop_text_ends_an_answer_and_names_itself(llm) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stop = whole.text[3:5]
    place = whole.text.find(stop)
    params = SamplingParams(temperature=0, max_tokens=400, stop=[stop, "never"], ignore_eos=True)
    (found,) = llm.generate(PROMPTS[0], params)
    answer = found.outputs[0]
    assert answer.text == whole.text[:place] and answer.finish_reason == "stop" and answer.stop_reason == stop
    assert len(answer.token_ids) <= len(whole.token_ids)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_a_stream_grows_to_the_whole_answer(llm) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    whole = llm.generate(PROMPTS[1], params)[0].outputs[0]
    texts, ids = [], []
    for found in llm.stream(PROMPTS[1], params):
        texts.append(found.outputs[0].text)
        ids.append(list(found.outputs[0].token_ids))
    assert texts[-1] == whole.text and ids[-1] == whole.token_ids and found.finished
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    assert len(texts) > 2


def running(llm: LLM) -> int:
    beat = llm._model.engine.texts[0].engine.link.beat()
    return -1 if beat is None else beat.running


def test_a_stream_that_is_left_is_cancelled(llm) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = llm.stream(PROMPTS[0], long)
    next(stream)
    stream.close()
    wait_until(lambda: running(llm) == 0, 20, "the engine to have no sequence")


def test_answers_have_the_form_that_is_wanted(llm) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    wanted = [
        SamplingParams(structured_outputs={"regex": "(ab|c){2,3}"}, max_tokens=40),
        SamplingParams(structured_outputs={"choice": ["high", "low"]}, max_tokens=40),
        SamplingParams(structured_outputs={"json": schema}, max_tokens=400),
    ]
    texts = [one.outputs[0].text for one in llm.generate([PROMPTS[0]] * 3, wanted)]
    assert re.fullmatch("(ab|c){2,3}", texts[0]) and texts[1] in ("high", "low")
    assert json.loads(texts[2]) in ({"x": 1}, {"x": 22})


def test_an_error_names_the_field_and_ends_the_others(llm) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with pytest.raises(RequestError, match="top_p is|top_p"):
        llm.generate(PROMPTS[:2], [long, SamplingParams(top_p=1.5)])
    wait_until(lambda: running(llm) == 0, 20, "the engine to have no sequence")
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(max_tokens=10**6), "max_tokens"),
        (SamplingParams(min_tokens=9, max_tokens=3), "min_tokens is 9 and max_tokens is 3"),
        (SamplingParams(n=65), "n is 65"),
        (SamplingParams(logprobs=21), "logprobs is 21"),
        (SamplingParams(prompt_logprobs=21), "^prompt_logprobs is 21; wanted 0 to 20"),
        (SamplingParams(prompt_logprobs=-1), "^prompt_logprobs is -1"),
        (SamplingParams(n=3, best_of=2), "best_of is 2 and n is 3; wanted best_of of n or more"),
        (SamplingParams(best_of=65), "is 65"),
        (SamplingParams(stop_token_ids=[10**6]), "stop_token_ids has 1000000"),
        (SamplingParams(temperature=math.nan), "temperature is nan"),
        (BeamSearchParams(beam_width=65), "beam_width is 65"),
        (SamplingParams(structured_outputs={"jsn": {}}), 'structured_outputs has the unknown key "jsn"'),
        (SamplingParams(structured_outputs={"choice": [1]}), r"structured_outputs.choice\[0\] is 1"),
    ],
)
def test_wrong_parameters_are_named(llm, params, text) -> None:
    with pytest.raises(RequestError, match=text):
        llm.generate(PROMPTS[0], params)


@pytest.mark.parametrize(
    "prompt", [[""], {"prompt": "a", "image": 1}, {}, ["a", 1.5], {"prompt": 3}, [[1, "a"]], [-1]]
)
def test_wrong_prompts_are_refused(llm, prompt) -> None:
    if prompt == [""]:  # an empty text is a prompt: the model's start token
        assert llm.generate(prompt, GREEDY)[0].finished
        return
    with pytest.raises((RequestError, TypeError), match="prompt|iterable"):
        llm.generate(prompt, GREEDY)


def test_a_chat_is_rendered_by_the_checkpoints_template(llm, reference) -> None:
    _, tokenizer = reference
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (found,) = llm.chat(messages, GREEDY)
    assert found.prompt == text == "<user>Hello<assistant>"
    assert found.prompt_token_ids == tokenizer(text, add_special_tokens=False).input_ids
    both = llm.chat([messages, messages], GREEDY)
    assert [one.outputs[0].token_ids for one in both] == [found.outputs[0].token_ids] * 2
    *_, last = llm.stream_chat(messages, GREEDY)
    assert last.outputs[0].token_ids == found.outputs[0].token_ids


def test_threads_and_event_loops_share_one_model(llm) -> None:
    wanted = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(daemon=True, target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(4)] == wanted

    async def stream(prompt: str) -> list[int]:
        return [list(one.outputs[0].token_ids) async for one in llm.astream(prompt, GREEDY)][-1]

    async def together() -> list:
        return await asyncio.gather(llm.agenerate(PROMPTS, GREEDY), *map(stream, PROMPTS))

    results, *streams = asyncio.run(together())
    assert [one.outputs[0].token_ids for one in results] == wanted and streams == wanted


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers_hidden_states_after_the_final_norm(llm, reference, pooling) -> None:
    model, tokenizer = reference
    found = llm.embed(PROMPTS, PoolingParams(pooling, normalize=False))
    unit = llm.embed(PROMPTS, PoolingParams(pooling))
    for prompt, one, scaled in zip(PROMPTS, found, unit):
        with torch.no_grad():
            states = model.model(torch.tensor([tokenizer(prompt).input_ids])).last_hidden_state[0].numpy()
        wanted = states[-1] if pooling == "last" else states.mean(0)
        np.testing.assert_allclose(one.outputs.embedding, wanted, atol=2e-4)
        np.testing.assert_allclose(scaled.outputs.embedding, wanted / np.linalg.norm(wanted), atol=2e-4)
        assert one.prompt == prompt
    with pytest.raises(RequestError, match="pooling is 'max'"):
        llm.embed(PROMPTS[0], PoolingParams("max"))


def test_wrong_arguments_are_refused_before_anything_is_converted(tmp_path, checkpoint) -> None:
    for arguments, text in (
        ({"quantization": "int5"}, "--quantize int5"),
        ({"max_model_len": -1}, "max_sequence_tokens"),
        ({"chat_template": tmp_path / "absent"}, "chat_template is .*absent; wanted a file that exists"),
    ):
        with pytest.raises(ConfigError, match=text):
            LLM(str(checkpoint), cache=tmp_path / "cache", **arguments)
    with pytest.raises(ConfigError, match="no such file or folder"):
        LLM(str(tmp_path / "absent"), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_engine_ends_with_a_process_that_says_nothing(repository, tmp_path) -> None:
    code = (
        "import os, sys; from tridecode import LLM, SamplingParams\n"
        "(found,) = LLM(sys.argv[1]).generate('a', SamplingParams(max_tokens=2))\n"
        "print(found.finished, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "TRIDECODE_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(repository)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9 and done.stdout.strip() == "True", done.stderr

    def left() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if any(str(tmp_path / "run") in word for word in process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    wait_until(lambda: not left(), 60, "supervisor and engine to end")


def test_importing_tridecode_imports_nothing_heavy() -> None:
    code = (
        "import sys, tridecode\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'LLM' in dir(tridecode)\n"
        "from tridecode import LLM\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
