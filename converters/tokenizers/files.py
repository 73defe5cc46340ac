"""Writes the checkpoint's tokenizer as files for a door, which has the tokenizers library but not
transformers.

The written tokenizer behaves as in transformers: its post-processor adds BOS and EOS, or does not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tridecode.backend.base.checkpoint_files import (
    MAX_JSON_BYTES,
    MAX_SETTINGS_BYTES,
    read_json,
    require_file,
)
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.gguf.tokenizer import is_tokenizer, load_gguf_tokenizer
from tridecode.converters.tokenizers.limits import check_tokenizer_files
from tridecode.converters.tokenizers.sentencepiece import MODEL_FILE, load_sentencepiece

_CLEAN_UP = "clean_up_tokenization_spaces"
#: any of these sets makes a tokenizer
_SOURCES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
#: copied where the source has them
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
#: several scripts, digits, blanks, code and emoji, which reveal a wrong normaliser or split
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "In 2024, 1,234 of 56789 people paid $3.50 (≈ 70%).",
    "  two leading blanks,\ttab,\n\nnew lines  and a trailing blank ",
    "Él llegó tarde; größer, naïve, œuvre, Čeština.",
    "Все счастливые семьи похожи друг на друга.",
    "今日は天気がいいですね。明日は雨です。",
    "حسنًا، لنبدأ الآن. שלום עולם",
    "Emoji 🙂🚀 and a family 👩‍👩‍👧.",
    "for i in range(10):\n    print(f'{i:>3}')  # 100%",
    "",
)


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint comes with a tokenizer; a damaged one counts."""
    if checkpoint.tokenizer_dir is None:
        return is_tokenizer(checkpoint.gguf_fields.get("tokenizer.ggml.model"))
    return _has_tokenizer_files(checkpoint.tokenizer_dir)


def _has_tokenizer_files(directory: Path) -> bool:
    return any(all((directory / name).exists() for name in names) for names in _SOURCES)


def load_tokenizer(checkpoint: Checkpoint, override: Path | None = None) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of a checkpoint, or of the directory `override`.

    Raises CheckpointError where the files are missing or transformers cannot read them, UnsupportedError for
    a GGUF whose way of splitting text cannot be rebuilt.
    """
    directory = override or checkpoint.tokenizer_dir
    if directory is not None:
        if not _has_tokenizer_files(directory):
            wanted = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
            raise CheckpointError(f"{directory} has no tokenizer; wanted {wanted}")
        check_tokenizer_files(directory)
        if (directory / "chat_template.jinja").exists():
            require_file(directory / "chat_template.jinja", MAX_SETTINGS_BYTES)
        return _load_directory(directory)
    return load_gguf_tokenizer(checkpoint.gguf_fields, checkpoint.path)


def _load_directory(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that transformers chooses; for bare files without a class, GPT-2's or
    sentencepiece's.
    """
    has_model = (directory / MODEL_FILE).exists() and not (directory / "tokenizer.json").exists()
    if any(
        (directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
    ):
        try:
            return _load(directory)
        except CheckpointError:  # code of its own, or an unfit version of protobuf
            if not has_model:
                raise
    return load_sentencepiece(directory, PROBES) if has_model else _load(directory, GPT2Tokenizer)


def _load(directory: Path, kind: type = AutoTokenizer, **kwargs) -> PreTrainedTokenizerBase:
    try:
        tokenizer = kind.from_pretrained(  # type: ignore[attr-defined]
            directory, local_files_only=True, trust_remote_code=False, **kwargs
        )
    except Exception as error:  # transformers and tokenizers raise bare Exception among others
        reason = " ".join(str(error).split())
        if "is not an instance of" in reason or "cannot be converted" in reason:
            reason += (
                "; its model is of another kind than tokenizer_class of tokenizer_config.json needs: correct "
                "the class, e.g. PreTrainedTokenizerFast"
            )
        raise CheckpointError(f"transformers cannot read the tokenizer of {directory}: {reason}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"the tokenizer of {directory} has no form that the tokenizers library runs")
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path | None, directory: Path) -> Tokenizer:
    """Write tokenizer.json and its companions into `directory`; returns what a door will load.

    source: the directory whose companion files are copied; None (GGUF): transformers writes them. Raises
    CheckpointError where the written tokenizer and transformers' split a probe differently.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if source is None or _is_rebuilt(tokenizer, source):
        tokenizer.save_pretrained(directory)
    else:
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(require_file(source / name, MAX_JSON_BYTES), directory / name)
    _make_readable_everywhere(directory / "tokenizer_config.json")
    _keep_clean_up(tokenizer, directory / "tokenizer_config.json")
    written = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    written.no_truncation()  # transformers sets both for each call; a door must never cut or pad a prompt
    written.no_padding()
    written.save(str(directory / "tokenizer.json"))
    for probe in PROBES:
        wanted, found = _both(tokenizer, written, probe, source or directory)
        if found != wanted:
            raise CheckpointError(f"tokenizer.json splits {probe!r} into {found}; transformers into {wanted}")
    return written


def _both(
    tokenizer: PreTrainedTokenizerBase, written: Tokenizer, text: str, where: Path
) -> tuple[list[int], list[int]]:
    """Return the ids of transformers' tokenizer and of the written one.

    Raises CheckpointError for one that cannot encode, e.g. because its vocabulary lacks its unk token.
    """
    try:
        return tokenizer(text).input_ids, written.encode(text).ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # `tokenizers` raises bare Exception, and PanicException for a pattern
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the tokenizer of {where} cannot encode {text!r}: {reason}") from None


def _is_rebuilt(tokenizer: PreTrainedTokenizerBase, source: Path) -> bool:
    """Return whether transformers rebuilt the tokenizer: the source's tokenizer_config.json is missing, or
    names a class that was not used.
    """
    if (source / "tokenizer.json").is_file():
        return False
    return type(tokenizer) is PreTrainedTokenizerFast or not (source / "tokenizer_config.json").is_file()


def _keep_clean_up(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the class's setting into the file if it is missing there: doors read the file."""
    settings = read_json(path) if path.is_file() else {}
    if bool(settings.get(_CLEAN_UP, False)) != bool(tokenizer.clean_up_tokenization_spaces):
        changed = {**settings, _CLEAN_UP: bool(tokenizer.clean_up_tokenization_spaces)}
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _make_readable_everywhere(path: Path) -> None:
    """Put transformers 4's names into a tokenizer_config.json of transformers 5, which reads both: the class
    TokenizersBackend and a list of extra_special_tokens are unknown to the older version.
    """
    if not path.is_file():
        return
    settings = read_json(path)
    changed = dict(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
        for key in ("backend", "is_local", "local_files_only"):  # written by that run only
            changed.pop(key, None)
    if isinstance(settings.get("extra_special_tokens"), list):
        extra = changed.pop("extra_special_tokens")
        if extra:
            changed["additional_special_tokens"] = [*settings.get("additional_special_tokens", []), *extra]
    if changed != settings:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
