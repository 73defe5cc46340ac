"""Tasks of prompt learning: PEFT's folders and FasterTransformer's directories, compared with PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, prompts_of
from tests.backend.engine.thread_ranks import generate_on_ranks
from tests.checkpoints import FAMILIES, save
from tests.prompt_adapters import greedy_peft, make_prompt, prefix_table
from tridecode.backend.base.errors import (
    CheckpointError,
    ConfigError,
    RequestError,
    UnsupportedError,
    WeightFileError,
)
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import read_model_config
from tridecode.backend.models.prompt_ini import read_prompt_section
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.prompt_learning import LearnedPrompt, PromptTask, default_start_id
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.sources.peft_prompts import open_peft_prompt

TOKENS = 5
LENGTHS = {"prompt": 4, "p": 6, "prefix": 9}
SETTINGS = {
    "p": {"encoder_hidden_size": 24},
    "prefix": {"prefix_projection": True, "encoder_hidden_size": 20},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """(model, {kind: PEFT's model}, folder) of a family: weights/<degree> has the three tasks."""
    made: dict[str, tuple] = {}

    def make(family: str, degree: int = 1):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = FAMILIES[family](**FAMILIES[family].shared)
            adapted = {
                kind: make_prompt(model, folder / kind, kind, length, seed, **SETTINGS.get(kind, {}))
                for seed, (kind, length) in enumerate(LENGTHS.items())
            }
            made[family] = model, adapted, folder, save(model, folder / "hf", tokenizer=False)
        model, adapted, folder, saved = made[family]
        weights = folder / f"{degree}-gpu"
        if not weights.exists():
            checkpoint = open_checkpoint(saved)
            checkpoint.prompts = [open_peft_prompt(folder / kind) for kind in LENGTHS]
            plan_conversion(checkpoint).write(weights, degree)
        return model, adapted, weights

    return make


def task(number: int, prompt: list[int], vocab: int) -> tuple[list[int], LearnedPrompt]:
    """The engine's prompt of a task: its table in front."""
    rows = list(LENGTHS.values())[number]
    return [*range(vocab, vocab + rows), *prompt], LearnedPrompt(task=number)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "gptj"])
def test_tasks_give_what_peft_gives(tasks, family: str) -> None:
    """Prompt tuning, p-tuning and prefix tuning, and the model without a task, in one batch."""
    model, adapted, weights = tasks(family)
    config = EngineConfig(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=1 << 20)
    offline = OfflineEngine.load(weights, config, keep_logits=True)
    vocab, params = model.config.vocab_size, SamplingParams(max_tokens=TOKENS)
    prompts = prompts_of([11, 3], vocab, seed=2)
    asked = []
    for prompt in prompts:
        for number, kind in enumerate(LENGTHS):
            ids, learned = task(number, prompt, vocab)
            asked.append(
                (offline.submit(ids, params, "", learned), greedy_peft(adapted[kind], prompt, TOKENS))
            )
        asked.append((offline.submit(prompt, params), hf_greedy(model, prompt, TOKENS)))
    offline.run()
    for number, (tokens, logits) in asked:
        assert offline.generations[number].tokens == tokens
        assert np.abs(np.stack(offline.generations[number].logits) - logits).max() < fp32_bound(logits)


@pytest.mark.parametrize("family, stored, tensor, stages", [("gptj", 2, 1, 2), ("llama", 1, 4, 1)])
def test_ranks_have_their_share_of_tasks_and_tables(tasks, family, stored, tensor, stages) -> None:
    """Files of one degree at another, also where ranks share a kv head; a request's tables, too."""
    model, adapted, weights = tasks(family, stored)
    vocab = model.config.vocab_size
    prompt = prompts_of([13], vocab, seed=3)[0]
    asked = [task(number, prompt, vocab) for number in range(3)]
    cached = prefix_table(adapted["prefix"]).float().numpy()
    asked.append((asked[2][0], LearnedPrompt(-1, True, 9, "fp32", cached.tobytes())))
    embedded = adapted["prompt"].get_prompt_embedding_to_save("default").float().numpy()
    asked.append((asked[0][0], LearnedPrompt(-1, False, 4, "fp32", embedded.tobytes())))
    answers, _ = generate_on_ranks(
        weights, tensor, stages, [ids for ids, _ in asked], TOKENS, learned=[learned for _, learned in asked]
    )
    kinds = ("prompt", "p", "prefix", "prefix", "prompt")
    wanted = [greedy_peft(adapted[kind], prompt, TOKENS)[0] for kind in kinds]
    assert answers == wanted


def test_a_directory_of_fastertransformer_keeps_its_tasks(tasks, tmp_path: Path) -> None:
    """Tasks without a file keep their numbers; the directory is converted to another degree and dtype."""
    model, _, weights = tasks("gptj", 2)
    (weights / "manifest.json").rename(tmp_path / "manifest.json")  # FasterTransformer writes none
    ini = (weights / "config.ini").read_text()
    try:
        (weights / "config.ini").write_text(
            ini.replace("num_tasks = 3", "num_tasks = 4").replace(
                "prompt_learning_start_id = 331", "prompt_learning_start_id = 400"
            )
            + "[task_3]\ntask_name = lost\nprompt_length = 5\n"
        )
        checkpoint = open_checkpoint(weights)
        assert any(
            "the task lost of prompt learning has no model.prompt_table.lost" in n for n in checkpoint.notes
        )
        plan_conversion(checkpoint, "fp16").write(tmp_path / "again", 1)
    finally:
        (weights / "config.ini").write_text(ini)
        (tmp_path / "manifest.json").rename(weights / "manifest.json")
    section = read_prompt_section(tmp_path / "again", read_model_config(tmp_path / "again"))
    lengths = [*LENGTHS.values(), 5]
    kinds = [3, 3, 2, 3]
    names = [*LENGTHS, "lost"]
    assert section.tasks == [PromptTask(*each) for each in zip(names, lengths, kinds)]
    assert section.start_id == 400
    shape = (model.config.n_layer, 2, -1, 9, model.config.n_embd // model.config.n_head)
    merged = np.fromfile(tmp_path / "again/model.prefix_prompt.prefix.weight.0.bin", np.float16).reshape(
        shape
    )
    parts = [
        np.fromfile(weights / f"model.prefix_prompt.prefix.weight.{rank}.bin", np.float32).reshape(shape)
        for rank in (0, 1)
    ]
    wanted = np.concatenate(parts, axis=2).astype(np.float16)
    assert np.array_equal(merged, wanted)
    offline = OfflineEngine.load(tmp_path / "again", EngineConfig(cache_bytes=1 << 20))
    with pytest.raises(
        RequestError, match=r"task 3 \(lost\) cannot be served: model.prompt_table.lost.weight.bin is missing"
    ):
        offline.submit([5], SamplingParams(), "", LearnedPrompt(task=3))


def damaged(weights: Path, directory: Path, name: str, change) -> Path:
    """A copy of links to the files of `weights`, with one file changed."""
    directory.mkdir()
    for file in weights.iterdir():
        (directory / file.name).symlink_to(file)
    content = change((directory / name).read_bytes())
    (directory / name).unlink()
    (directory / name).write_bytes(content)
    return directory


NAN = np.array([np.nan], np.float32).tobytes()
TABLE, PREFIX = "model.prompt_table.p.weight.bin", "model.prefix_prompt.prefix.weight.0.bin"
INI, NAME = "config.ini", b"task_name = p\n"


def replaced(old: bytes, new: bytes):
    return lambda text: text.replace(old, new)


DAMAGES = {
    "a short table": (TABLE, lambda data: data[:-4], WeightFileError, "holds .* bytes; .* needs"),
    "a long prefix": (PREFIX, lambda data: data + data[:4], WeightFileError, "holds .* needs"),
    "a NaN": (TABLE, lambda data: NAN + data[4:], WeightFileError, "not finite"),
    "no section": (INI, replaced(b"[task_1]", b"[other]"), ConfigError, r"a section \[task_1\]"),
    "no name": (INI, replaced(NAME, b""), ConfigError, "has no task_name"),
    "a path as a name": (INI, replaced(NAME, b"task_name = ../p\n"), ConfigError, "wanted letters"),
    "a name twice": (INI, replaced(NAME, b"task_name = prompt\n"), ConfigError, "of another task"),
    "an unknown type": (
        INI, replaced(b"learning_type = 2", b"learning_type = 7"), ConfigError, "type = 7; wanted 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_tasks_end_the_start_with_a_reason(tasks, case: str, tmp_path: Path) -> None:
    name, change, error, told = DAMAGES[case]
    directory = damaged(tasks("gptj")[2], tmp_path / "weights", name, change)
    with pytest.raises(error, match=told):
        OfflineEngine.load(directory, EngineConfig(cache_bytes=1 << 20))


def test_tasks_may_be_added_to_a_converted_directory(tasks, tmp_path: Path) -> None:
    """The manifest is of the model's tensors: tasks come and go."""
    weights = tasks("gptj")[2]
    directory = damaged(
        weights,
        tmp_path / "weights",
        "config.ini",
        lambda text: text.replace(b"num_tasks = 3", b"num_tasks = 1"),
    )
    offline = OfflineEngine.load(directory, EngineConfig(cache_bytes=1 << 20))
    assert [each.name for each in offline.engine.state.prompt_limits.tasks] == ["prompt"]


@pytest.mark.parametrize(
    "vocab, end_id, wanted",
    [
        (50257, 50256, 50257),
        (50304, 50256, 50257),
        (250880, 2, 250880),
        (128256, 128001, 128002),
        (331, 2, 331),
        (7, -1, 7),
    ],
)
def test_virtual_ids_begin_where_no_ordinary_id_is_taken(vocab: int, end_id: int, wanted: int) -> None:
    assert default_start_id(vocab, end_id) == wanted


def test_other_adapters_are_told(tasks, tmp_path: Path) -> None:
    folder = tasks("gptj")[2].parent / "p"
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, changes, error, told in (
        ("lora", {"peft_type": "LORA"}, UnsupportedError, "peft_type = LORA; wanted PROMPT_TUNING, P_TUNING"),
        ("t5", {"num_transformer_submodules": 2}, UnsupportedError, "of an encoder and a decoder"),
        ("long", {"num_virtual_tokens": 7}, CheckpointError, "num_virtual_tokens = 7"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        (tmp_path / name / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
        with pytest.raises(error, match=told):
            open_peft_prompt(tmp_path / name)
    assert torch.isfinite(open_peft_prompt(folder).read()).all()
