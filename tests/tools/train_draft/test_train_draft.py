"""train-draft: the heads learn, their figures match a plain loop over transformers, bad input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.checkpoints import FAMILIES, save
from tridecode.backend.weights.draft_files import INFO_FILE, TENSORS_FILE
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.cli import app
from tridecode.tools.train_draft.hidden import read_hidden
from tridecode.tools.train_draft.small_model import cut_model, save_model
from tridecode.tools.train_draft.target import open_target
from tridecode.tools.train_draft.texts import Text

VOCAB, FIRST = 120, 10


def successors() -> np.ndarray:
    """Return the next token of each id: one cycle over the ids from FIRST on."""
    order = np.random.default_rng(0).permutation(np.arange(FIRST, VOCAB))
    after = np.zeros(VOCAB, np.int64)
    after[order] = np.roll(order, -1)
    return after


def learnt_model(folder: Path, layers: int) -> Path:
    """Save a LLaMA that has learnt a language in which each token has one successor."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **ids, **sizes)
    model = LlamaForCausalLM(config)
    after, rows = successors(), [np.arange(FIRST, VOCAB)]
    for _ in range(12):
        rows.append(after[rows[-1]])
    texts = torch.from_numpy(np.stack(rows, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(texts, labels=texts).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Path:
    return learnt_model(tmp_path_factory.mktemp("learnt") / "hf", 1)


@pytest.fixture(scope="module")
def learnt_deep(tmp_path_factory) -> Path:
    return learnt_model(tmp_path_factory.mktemp("learnt") / "hf", 2)


def write_prompts(path: Path) -> Path:
    """Write prompts of the language as token ids."""
    after = successors()
    rows = [[int(token), int(after[token])] for token in range(FIRST, VOCAB)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "ids.jsonl")


def run(*arguments: object):
    common = ["--device", "cpu", "--text-tokens", "24", "--prompt-tokens", "8"]
    return CliRunner().invoke(app, ["train-draft", *common, *map(str, arguments)])


def train(model: Path, output: Path, *more: object) -> dict:
    done = run("--model", model, "--output", output, *more)
    assert done.exit_code == 0, done.output
    return json.loads((output / INFO_FILE).read_text())


def test_heads_learn_what_the_target_writes(learnt: Path, prompts: Path, tmp_path: Path) -> None:
    small = ("--tokens", 2400, "--held-back", 8, "--epochs", 30, "--batch", 128, "--depth", 3)
    info = train(learnt, tmp_path / "a", "--prompts", prompts, *small)
    rates = info["tokens_per_step"]
    assert len(rates) == 3 and rates[0] > 1.9 and rates[2] > 3.5, rates
    assert info["kind"] == "heads" and info["hidden_size"] == 48 and info["vocab_size"] == VOCAB
    assert info["texts"]["held_back"] == 8 and info["target"]
    again = train(learnt, tmp_path / "b", "--prompts", prompts, *small)
    first, second = (load_file(tmp_path / name / TENSORS_FILE) for name in "ab")
    assert again == info and all(torch.equal(first[name], second[name]) for name in first)


def test_torch_uses_the_given_number_of_threads(learnt: Path, prompts: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        small = ("--tokens", 256, "--held-back", 4, "--epochs", 1, "--batch", 128, "--depth", 1)
        train(learnt, tmp_path / "heads", "--prompts", prompts, *small)
        assert torch.get_num_threads() == 2
        train(learnt, tmp_path / "more", "--prompts", prompts, *small, "--threads", 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def plain_tokens_per_step(folder: Path, model: torch.nn.Module, texts: list[Text], depth: int) -> float:
    """Decode each text step by step with the drafts of the files' tensors, in float64."""
    tensors = {name: x.double().numpy() for name, x in load_file(folder / TENSORS_FILE).items()}
    table = model.get_input_embeddings().weight.detach().double().numpy()
    head = model.get_output_embeddings().weight.detach().double().numpy()

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-5)

    tokens = steps = 0
    for text in texts:
        with torch.inference_mode():
            out = model(torch.from_numpy(text.ids).long()[None], output_hidden_states=True)
        states = out.hidden_states[-1][0].double().numpy()
        newest = text.prompt
        while newest < len(text.ids) - 1:
            z = states[newest - 1]
            inner = tensors["hidden.weight"] @ rms(z) + tensors["hidden.bias"]
            inner += tensors["token.weight"] @ rms(table[text.ids[newest]])
            inner /= 1 + np.exp(-inner)
            drafts = [
                int((head @ (z + part @ inner)).argmax())
                for part in tensors["outs.weight"].reshape(depth, len(z), -1)
            ]
            kept = 0
            while kept < depth and newest + kept + 1 < len(text.ids):
                if drafts[kept] != text.ids[newest + kept + 1]:
                    break
                kept += 1
            tokens, steps = tokens + min(kept + 1, len(text.ids) - 1 - newest), steps + 1
            newest += kept + 1
    return tokens / steps


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], new: int) -> Text:
    ids = torch.tensor([prompt])
    for _ in range(new):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1)[:, None]], 1)
    return Text(ids[0].numpy().astype(np.int32), len(prompt))


def test_the_figures_are_those_of_a_plain_loop_over_transformers(
    learnt: Path, prompts: Path, tmp_path: Path
) -> None:
    # little training, so that some drafts are wrong
    small = ("--tokens", 1200, "--held-back", 20, "--epochs", 24, "--batch", 128, "--depth", 3, "--seed", 3)
    small += ("--width", 96, "--rate", 1e-3)
    info = train(learnt, tmp_path / "a", "--prompts", prompts, *small)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    order = np.random.default_rng(3).permutation(len(rows))
    model = AutoModelForCausalLM.from_pretrained(learnt).eval()
    texts = [greedy(model, rows[index], 24) for index in order[-20:]]
    wanted = plain_tokens_per_step(tmp_path / "a", model, texts, 3)
    assert 1.2 < wanted < 3.9
    assert info["tokens_per_step"][2] == pytest.approx(wanted, rel=0.02)  # the tool computes in 16 bit


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neox", "gptj"])
def test_hidden_states_are_transformers(name: str, tmp_path: Path) -> None:
    folder = save(FAMILIES[name](), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = np.random.default_rng(0).integers(2, 40, 40)
    texts = [Text(np.random.default_rng(n).integers(0, 300, n).astype(np.int32), 1) for n in lengths]
    with open_target(str(folder), "cpu", 41) as target:
        found = read_hidden(target.engine(41), texts)
    for text, states in zip(texts, found):
        with torch.inference_mode():
            ids = torch.from_numpy(text.ids).long()[None]
            wanted = model(ids, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)


def test_prompts_are_drawn_where_none_are_given(tmp_path: Path) -> None:
    folder = save(FAMILIES["gpt_neox"](), tmp_path / "hf")
    small = ("--tokens", 1000, "--held-back", 4, "--epochs", 1, "--depth", 2, "--temperature", 0.5)
    info = train(folder, tmp_path / "a", *small)
    assert info["family"] == "gptneox" and info["depth"] == 2
    assert info["texts"]["tokens"] > 500 and all(1 <= rate <= 3 for rate in info["tokens_per_step"])


BAD_PROMPTS = {
    "not JSON": ('{"prompt": ', "not valid JSON"),
    "no prompt": ('{"text": "a"}', "has no prompt"),
    "beyond the vocabulary": ("[3, 120]", "token id 120; wanted ids from 0 to 119"),
    "negative": ("[-1]", "token id -1"),
    "empty": ("[]", "no token"),
    "text without a tokenizer": ('"a text"', "no tokenizer"),
    "booleans": ("[true]", "has no prompt"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_line_of_prompts_is_named(learnt: Path, tmp_path: Path, case: str) -> None:
    line, wanted = BAD_PROMPTS[case]
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"[11, 12]\n{line}\n")
    done = run("--model", learnt, "--output", tmp_path / "a", "--prompts", path)
    assert done.exit_code == 2 and wanted in done.output and f"{path}:2" in done.output.replace("\n", "")
    assert not (tmp_path / "a").exists()


def test_bad_options_are_named_before_work(learnt: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    new, few = tmp_path / "new", tmp_path / "few.jsonl"
    few.write_text("[11]\n[12]\n")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--model", learnt, "--output", tmp_path / "there"), "exists; wanted a new folder"),
        (
            ("--model", learnt, "--output", new, "--kind", "eagle"),
            "--kind eagle: wanted heads, model or glide",
        ),
        (("--model", learnt, "--output", new, "--device", "tpu"), "--device tpu: wanted auto"),
        (("--model", learnt, "--output", new, "--prompts", tmp_path / "none"), "no such file"),
        (("--model", learnt, "--output", new, "--prompts", few), "2 prompts; wanted more than --held-back"),
        (("--model", tmp_path / "none", "--output", new), "no such file or folder"),
        (("--model", learnt, "--output", new, "--text-tokens", 64), "has 64 positions"),
        (("--model", learnt, "--output", new, "--tokens", 10**9), "they may take 50% of it"),
        (("--model", tmp_path / "there", "--output", new), "there"),
        (
            ("--model", learnt, "--output", few / "new"),
            f"{few / 'new'}: Not a directory; wanted a new folder",
        ),
        (("--model", learnt, "--output", new, "--kind", "model", "--layers", 1), "less than the 1 layers of"),
    ]
    for arguments, wanted in cases:
        done = run(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert wanted in done.output.replace("\n", " "), (wanted, done.output)
        assert not new.exists()


def test_a_draft_model_is_some_layers_of_the_target(learnt_deep: Path, prompts: Path, tmp_path: Path) -> None:
    small = ("--tokens", 2400, "--held-back", 8, "--epochs", 12, "--batch", 256, "--depth", 3)
    more = ("--kind", "model", "--layers", 1, "--prompts", prompts)
    info = train(learnt_deep, tmp_path / "a", *small, *more)
    assert info["kind"] == "model" and info["texts"]["layers"] == 1
    assert info["tokens_per_step"][2] > 3.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(learnt_deep).eval()
    assert model.config.num_hidden_layers == 1 and target.config.num_hidden_layers == 2
    after = successors()
    found = greedy(model, [FIRST], 12).ids.tolist()
    assert found == greedy(target, [FIRST], 12).ids.tolist()
    assert all(after[one] == other for one, other in zip(found, found[1:]))
    plan_conversion(open_checkpoint(tmp_path / "a"), "fp32")  # build-repo --draft reads it


def test_the_figures_of_a_draft_model_are_those_of_a_plain_loop(
    learnt_deep: Path, prompts: Path, tmp_path: Path
) -> None:
    """Drafts greedily, one after the other, from the text and the previous drafts."""
    small = ("--tokens", 800, "--held-back", 20, "--epochs", 1, "--batch", 256, "--depth", 3, "--seed", 3)
    more = ("--kind", "model", "--layers", 1, "--prompts", prompts, "--rate", 2e-4)
    info = train(learnt_deep, tmp_path / "a", *small, *more)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(learnt_deep).eval()
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    order = np.random.default_rng(3).permutation(len(rows))
    tokens = steps = 0
    for index in order[-20:]:
        ids = greedy(target, rows[index], 24).ids.tolist()
        newest = len(rows[index])
        while newest < len(ids) - 1:
            drafts = greedy(model, ids[: newest + 1], 3).ids.tolist()[newest + 1 :]
            kept = 0
            while kept < 3 and newest + kept + 1 < len(ids) and drafts[kept] == ids[newest + kept + 1]:
                kept += 1
            tokens, steps = tokens + min(kept + 1, len(ids) - 1 - newest), steps + 1
            newest += kept + 1
    assert 1.2 < tokens / steps < 3.9
    assert info["tokens_per_step"][2] == pytest.approx(tokens / steps, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neox", "gptj", "gpt2", "falcon", "gemma3_text"])
def test_a_model_of_any_family_is_cut(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(FAMILIES[name](), tmp_path / "hf"))
    model = cut_model(checkpoint, 1)
    save_model(model, checkpoint, tmp_path / "cut", torch.float32)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(found(ids).logits, model(ids).logits)
    assert plan_conversion(open_checkpoint(tmp_path / "cut"), "fp32").config.num_layers == 1


def test_a_draft_model_wants_a_checkpoint_with_more_layers(
    learnt: Path, prompts: Path, tmp_path: Path
) -> None:
    plan_conversion(open_checkpoint(learnt), "fp32").write(tmp_path / "weights")
    common = (
        "--kind",
        "model",
        "--layers",
        1,
        "--tokens",
        300,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "a",
    )
    done = run("--model", tmp_path / "weights", *common)
    assert done.exit_code == 2 and "wanted the checkpoint that they were made from" in done.output
    done = run("--model", learnt, *common)
    assert done.exit_code == 2 and "wanted less than the 1 layers of" in done.output.replace("\n", " ")
    assert "writing texts" not in done.output, "it is refused before work"
