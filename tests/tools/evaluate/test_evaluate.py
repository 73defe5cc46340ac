"""LAMBADA through a server and in transformers: the same accuracy, in both definitions, over every door.

The model has learnt half of the items by heart, so the accuracies are neither 0 nor 1. The server is a fake
whose answers come from our engine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2LMHeadModel
from typer.testing import CliRunner

from tests.checkpoints import TEXTS, save, tiny_gpt2
from tests.tools.fake_server import FakeModel, FakeServer, fake_server
from tridecode.backend.base.errors import ConfigError, EngineDownError, RequestError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.cli import app
from tridecode.tools.evaluate.in_process import engine_answers, repository_engine
from tridecode.tools.evaluate.lambada import LAST_TOKEN, LAST_WORD, Question, questions, read_items
from tridecode.tools.evaluate.reference import reference_answers
from tridecode.tools.evaluate.run import evaluate
from tridecode.tools.evaluate.served import ask, find_model

LEARNT = (
    "She told the wizard everything about the dragon",
    "The quick brown fox jumps over the lazy otter",
    "In the morning he went back to the harbour",
    "They said it was only a question of courage",
    "Nobody in the village believed old Gregor",
)
#: the last word is another: the model does not answer it
ALTERED = tuple(
    f"{text.rsplit(' ', 1)[0]} {word}" for text, word in zip(LEARNT, ("sea", "tax", "moon", "a", "Li"))
)
ITEMS = [*LEARNT, *ALTERED]
BOTH = [LAST_TOKEN, LAST_WORD]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A GPT-2 that has learnt LEARNT by heart, with its tokenizer."""
    torch.manual_seed(3)
    folder = save(tiny_gpt2(), tmp_path_factory.mktemp("learnt") / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()  # without dropout
    rows = [torch.tensor([tokenizer(text).input_ids]) for text in LEARNT]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    labels = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=-100) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(ids, labels=labels).loss
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory) -> OfflineEngine:
    weights = tmp_path_factory.mktemp("weights") / "w"
    plan_conversion(open_checkpoint(checkpoint), "fp32").write(weights)
    return OfflineEngine.load(weights, EngineConfig(max_sequences=4, cache_bytes=1 << 24))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lambada_test.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ITEMS))
    return path


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[bool]]:
    """transformers' generate, one question at a time; the tokens are prepared as the two scripts do it, with
    transformers' tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = GPT2LMHeadModel.from_pretrained(checkpoint).eval()

    def answers(prompt: list[int], target: list[int]) -> bool:
        options = dict(max_new_tokens=len(target), do_sample=False, eos_token_id=None, pad_token_id=0)
        done = model.generate(torch.tensor([prompt]), **options)
        return done[0, len(prompt) :].tolist() == target

    found: dict[str, list[bool]] = {LAST_TOKEN: [], LAST_WORD: []}
    for text in ITEMS:
        ids = tokenizer(text).input_ids
        found[LAST_TOKEN].append(answers(ids[:-1], ids[-1:]))
        before, word = text.rsplit(" ", 1)
        pair = tokenizer(before, f" {word}", return_token_type_ids=True)
        sides = list(zip(pair.input_ids, pair.token_type_ids))
        found[LAST_WORD].append(answers(*([i for i, kind in sides if kind == side] for side in (0, 1))))
    assert 0 < sum(found[LAST_TOKEN]) < len(ITEMS) and 0 < sum(found[LAST_WORD]) < len(ITEMS)
    return found


class EngineServer(FakeServer):
    """Token doors and text doors over one engine."""

    engine: OfflineEngine
    tokenizer: Tokenizer
    wrong_from = 1 << 30  # requests from this one on get other tokens

    def responses(self, model: FakeModel, request) -> list[dict[str, np.ndarray]]:
        given = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents))
        tokens_in = "input_ids" in given
        if tokens_in:
            prompt = np.frombuffer(given["input_ids"], np.uint32).tolist()
            count = int(np.frombuffer(given["request_output_len"], np.uint32)[0])
        else:
            prompt = self.tokenizer.encode(given["text_input"][4:].decode()).ids
            count = int(np.frombuffer(given["max_tokens"], np.int32)[0])
        with torch.inference_mode():
            done = self.engine.generate([prompt], SamplingParams(max_tokens=count))[0].tokens
        if len(self.requests) > self.wrong_from:
            done = [(token + 1) % 256 for token in done]
        steps = range(1, len(done) + 1) if model.decoupled else [len(done)]
        if tokens_in:
            rows = [prompt + done[:step] for step in steps]
            return [
                {
                    "output_ids": np.array([[row]], np.uint32),
                    "sequence_length": np.array([[len(row)]], np.uint32),
                }
                for row in rows
            ]
        whole = self.tokenizer.decode(done).encode()
        pieces = [whole[:1], whole[1:]] if model.decoupled else [whole]
        return [{"text_output": np.array([[piece]], object)} for piece in pieces]


TOKENS_IN = ("input_ids", "input_lengths", "request_output_len")
TEXT_IN = ("text_input", "max_tokens", "stream", "exclude_input_in_output")
DOORS = {
    "fastertransformer": (TOKENS_IN, False),
    "fastertransformer_streaming": (TOKENS_IN, True),
    "tensorrt_llm_bls": (TEXT_IN, True),
    "tensorrt_llm_bls_plain": (TEXT_IN, False),
}


@pytest.fixture
def server(engine, checkpoint):
    fakes = [FakeModel(name, inputs, decoupled=streams) for name, (inputs, streams) in DOORS.items()]
    with fake_server(*fakes, kind=EngineServer) as running:
        assert isinstance(running, EngineServer)
        running.engine = engine
        running.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        yield running


@pytest.mark.parametrize("door", DOORS)
def test_every_door_scores_what_transformers_generate_scores(server, checkpoint, data, expected, door):
    found = evaluate(
        data, server.url, door, BOTH, tokenizer=checkpoint, concurrency=3,
        reference=str(checkpoint), reference_dtype="fp32",
    )  # fmt: skip
    for score in found.scores:
        right = sum(expected[score.definition])
        assert (score.items, score.served, score.reference) == (len(ITEMS), right, right)
        assert (score.difference, score.differing) == (0.0, [])
    assert found.apart(0.0) == []


def test_answers_are_right_item_by_item(server, checkpoint, expected):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    asked = questions(tokenizer, ITEMS, BOTH)
    ours = ask(server.url, find_model(server.url, None), asked, 2, lambda done: None)
    theirs = reference_answers(checkpoint, "fp32", asked, lambda done: None)
    wanted = [expected[question.definition][question.item] for question in asked]
    assert ours == wanted and theirs == wanted


def test_equal_requests_are_sent_once_and_progress_counts_every_question(server, checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    asked = questions(tokenizer, ITEMS, BOTH)
    seen: list[int] = []
    ask(server.url, find_model(server.url, "fastertransformer"), asked, 4, seen.append)
    assert len(server.requests) == len({(question.prompt, len(question.target)) for question in asked})
    assert len(server.requests) < len(asked) and max(seen) == len(asked)


def run(*arguments: str):
    return CliRunner().invoke(app, ["evaluate-lambada", *arguments], env={"COLUMNS": "200"})


def test_the_command_prints_both_accuracies_and_writes_them(server, checkpoint, data, expected, tmp_path):
    done = run(
        *("--data", str(data), "--url", server.url, "--tokenizer", str(checkpoint)),
        *("--reference", str(checkpoint), "--reference-dtype", "fp32", "--output", str(tmp_path / "r.json")),
    )
    assert done.exit_code == 0, done.output
    right = sum(expected[LAST_WORD])
    assert f"{10 * right:.2f} % ({right}/10)" in done.output and "+0.00 points" in done.output
    assert "bloom_lambada.py" in done.output and "evaluate_lambada.py" in done.output
    scores = json.loads((tmp_path / "r.json").read_text())["scores"]
    assert [score["served_right"] for score in scores] == [sum(expected[name]) for name in BOTH]
    for name, score in zip(BOTH, scores):
        assert score["served_right_items"] == [item for item, right in enumerate(expected[name]) if right]


@pytest.fixture(scope="module")
def repository(checkpoint, tmp_path_factory) -> Path:
    """The repository is made for three ranks; one process runs all of it."""
    folder = tmp_path_factory.mktemp("repository") / "models"
    options = ["--dtype", "fp32", "--tp", "3", "--no-parity"]
    done = CliRunner().invoke(
        app, ["build-repo", "--model", str(checkpoint), "--output", str(folder), *options]
    )
    assert done.exit_code == 0, done.output
    return folder


def test_a_repositorys_engine_answers_without_a_server(repository, data, expected, tmp_path):
    done = run("--data", str(data), "--repository", str(repository), "--output", str(tmp_path / "r.json"))
    assert done.exit_code == 0, done.output
    scores = json.loads((tmp_path / "r.json").read_text())["scores"]
    for name, score in zip(BOTH, scores):
        assert score["served_right_items"] == [item for item, right in enumerate(expected[name]) if right]


def test_questions_that_wait_longer_than_the_deadline_of_requests_are_answered(
    repository, checkpoint, data, expected
):
    weights, config = repository_engine(repository)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    asked = questions(tokenizer, read_items(data), [LAST_WORD])
    hurried = replace(config, request_timeout_s=1e-6, device="cpu")
    assert engine_answers(weights, hurried, asked, lambda done: None) == expected[LAST_WORD]


def test_a_folder_that_is_no_repository_is_refused(data, tmp_path):
    done = run("--data", str(data), "--repository", str(tmp_path))
    assert done.exit_code == 2 and "has no fastertransformer/config.pbtxt" in done.output


def test_a_server_that_answers_otherwise_ends_with_1(server, checkpoint, data):
    server.wrong_from = 0
    done = run(
        *("--data", str(data), "--url", server.url, "--tokenizer", str(checkpoint)),
        *("--reference", str(checkpoint), "--definition", "last-word"),
    )
    assert done.exit_code == 1
    assert "last-word: the server's accuracy differs from transformers' by -" in done.output


def test_without_a_reference_only_the_server_is_asked(server, checkpoint, data, expected):
    done = run(
        *("--data", str(data), "--url", server.url, "--tokenizer", str(checkpoint), "--limit", "5"),
        *("--definition", "last-token"),
    )
    assert done.exit_code == 0 and "transformers" not in done.output
    right = sum(expected[LAST_TOKEN][:5])
    assert f"({right}/5)" in done.output


def test_a_failed_request_names_its_item(server, checkpoint, data):
    server.models["fastertransformer"].error_after = 0
    with pytest.raises(TridecodeError, match=r"fastertransformer at .*, item \d+: the engine was rebuilt"):
        evaluate(data, server.url, None, BOTH, tokenizer=checkpoint, concurrency=2)


def test_a_server_that_is_absent_or_without_the_model_is_one_clear_error(server, checkpoint, data):
    with pytest.raises(EngineDownError, match="no Triton server answers at localhost:9 "):
        evaluate(data, "localhost:9", None, BOTH, tokenizer=checkpoint)
    with pytest.raises(RequestError, match="unknown model: 'gpt9'"):
        evaluate(data, server.url, "gpt9", BOTH, tokenizer=checkpoint)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 2 is not valid JSON"),
        ('{"words": "a b"}', 'line 2: wanted {"text"'),
        ('{"text": "single"}', "two or more words"),
        ("[" * 9000, "line 2 is not valid JSON"),
    ],
)
def test_a_damaged_data_file_is_refused_with_its_line(tmp_path, line, text):
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "two words"}) + f"\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_items(tmp_path / "d.jsonl")
    assert text in str(caught.value)


def test_a_missing_or_empty_data_file_says_where_the_test_set_is(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for path in (tmp_path / "absent.jsonl", tmp_path / "empty.jsonl"):
        with pytest.raises(ConfigError, match="docs/guides/lambada.md"):
            read_items(path)


def test_an_unknown_definition_or_dtype_is_refused(data):
    assert "wanted last-token, last-word or both" in run("--data", str(data), "--definition", "word").output
    done = run("--data", str(data), "--reference", "x", "--reference-dtype", "fp8")
    assert done.exit_code == 2 and "fp8" in done.output


def test_a_tokenizer_that_puts_a_blank_before_texts_keeps_the_words_own_tokens():
    """SentencePiece's kind: " word" alone would begin with two blanks, which no model generates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator([*TEXTS, *ITEMS], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    for question, text in zip(questions(tokenizer, ITEMS, [LAST_WORD]), ITEMS):
        assert [*question.prompt, *question.target] == tokenizer.encode(text).ids


def test_tokens_that_end_a_text_are_no_part_of_it(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    plain = questions(tokenizer, ITEMS[:2], BOTH)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for before, after in zip(plain, questions(tokenizer, ITEMS[:2], BOTH)):
        assert isinstance(after, Question)
        assert (after.prompt, after.target) == ((1, *before.prompt), before.target)
        assert after.prompt_text + after.target_text == before.prompt_text + before.target_text
