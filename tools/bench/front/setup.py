"""Files of a run: a repository without weights, its tokenizer, and the client in C."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tridecode.backend.base.errors import ConfigError
from tridecode.model_repo_templates.repository import ENGINE_MODEL

TEXT = (
    " The ferry leaves the northern harbour at seven in the morning and returns before nine, unless the"
    " wind turns. Passengers who have bought a ticket may wait in the hall; the others stand in a queue"
    " that reaches the old customs house. On the way, the captain explains how the currents changed after"
    " the dam was built, why the lighthouse was moved, and what the fishermen think of both. At noon the"
    " second boat takes the mail, twelve bicycles and a crate of apples to the island, where nobody has"
    " owned a car since 1963."
)
_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %} [assistant]"
)
_VOCABULARY = 2000


def make_repository(folder: Path) -> tuple[Path, list[int], int]:
    """Write a repository for a fake engine. Returns it, the token ids of TEXT, and the vocabulary's size."""
    engine, text = folder / ENGINE_MODEL, folder / "text"
    weights, tokenizer_dir = engine / "1" / "1-gpu", text / "1" / "tokenizer"
    weights.mkdir(parents=True)
    tokenizer_dir.mkdir(parents=True)
    (weights / "manifest.json").write_text('{"format": "of a fake engine"}')
    (engine / "config.pbtxt").write_text("")
    (text / "config.pbtxt").write_text(
        _parameter("tokenizer_dir", "text/1/tokenizer") + _parameter("stop_ids", "")
    )
    tokenizer = _tokenizer()
    tokenizer.save(str(tokenizer_dir / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, tokenizer.encode(TEXT, add_special_tokens=False).ids, tokenizer.get_vocab_size()


def _parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def _tokenizer() -> Tokenizer:
    """Byte-level BPE whose tokens are mostly words, as those of large models are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def build_client(folder: Path) -> Path:
    """Compile client.c into `folder`. Raises ConfigError without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigError(
            "there is no C compiler: wanted `cc`, for the load client (tools/bench/front/client.c)"
        )
    program = folder / "client"
    source = Path(__file__).with_name("client.c")
    done = subprocess.run(
        [compiler, "-O2", "-o", str(program), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()}")
    return program
