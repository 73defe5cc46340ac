"""Compares the files themselves for PARITY.json: the tokenizer, the head's tying, and every shard's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from tridecode.backend.models import read_model_config
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.tokenizer_files import cleans_up
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.gguf.llama_cpp import llama_cpp_ids
from tridecode.converters.progress import byte_progress
from tridecode.converters.tokenizers.files import PROBES

#: texts that transformers' clean_up_tokenization_spaces changes
_BLANKS = "Well , it 's here ! Is n't it ? I 'm sure we 've seen ' them ' , they 're late ."
_MAX_DAMAGED = 20  # names in PARITY.json


@dataclass(frozen=True)
class TokenizerParity:
    """file: "tokenizer.json", or "none" for a repository without a tokenizer, which has token doors only.

    agreement: share of PROBES that it splits, and joins again, as transformers' tokenizer of the source does.
    round_trip: share that it decodes to what was encoded. Both are None without a tokenizer. A normalising
    tokenizer does not reproduce the text, neither does transformers': only agreement must be 1. reference:
    the reference for splitting the probes; "own reader": a GGUF file without an independent reference.
    """

    file: str = "none"
    agreement: float | None = None
    round_trip: float | None = None
    reference: str = "transformers"

    @property
    def passed(self) -> bool:
        return self.file == "none" or self.agreement == 1.0


def compare_tokenizers(
    folder: Path,
    written: Tokenizer,
    source: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None = None,
) -> TokenizerParity:
    """Compare a door's tokenizer with transformers' on PROBES: ids, and their text without special tokens, as
    a door writes it and as transformers' decode gives it by default. folder: the door's, of `written`.

    The tokenizer of a GGUF file is built by our own reader: its ids are also compared with llama.cpp's, if
    the package xllamacpp is installed. checkpoint: of such a file.
    """
    view, probes = TokenizerView(written, True, cleans_up(folder, written)), (*PROBES, _BLANKS)
    reference, theirs = "transformers", None
    if source.name_or_path.endswith(".gguf"):
        is_same_file = checkpoint is not None and source.name_or_path == str(checkpoint.path)
        theirs = llama_cpp_ids(checkpoint.gguf_fields, probes) if checkpoint and is_same_file else None
        reference = "own reader" if theirs is None else "llama.cpp"
    agree = round_trips = 0
    for number, probe in enumerate(probes):
        ids, wanted = written.encode(probe).ids, source(probe).input_ids
        text = view.text(view.shown(ids))
        agrees = ids == wanted and text == source.decode(wanted, skip_special_tokens=True)
        agree += agrees and (theirs is None or ids == theirs[number])
        round_trips += text == probe and probe in PROBES
    return TokenizerParity("tokenizer.json", agree / len(probes), round_trips / len(PROBES), reference)


@dataclass(frozen=True)
class LmHead:
    """Tying of the LM head to the word embedding: "tied", "untied", or "unknown" if the source does not show
    it.

    source: in the reference model. stored: in the directory that the converter wrote. served: as the engine
    reads it from there.
    """

    source: str
    stored: str
    served: str

    @property
    def passed(self) -> bool:
        return self.stored == self.served and self.source in (self.stored, "unknown")


def tying(tied: bool | None) -> str:
    return "unknown" if tied is None else "tied" if tied else "untied"


def is_tied(model: Module) -> bool | None:
    """Return whether a reference model's head equals its word embedding; None if it has only one of them."""
    shown: Any = model
    try:
        embedding, head = shown.get_input_embeddings(), shown.get_output_embeddings()
        return torch.equal(embedding.weight, head.weight)
    except (AttributeError, NotImplementedError):
        return None


def lm_head(source_tied: bool | None, stored_tied: bool, weights: Path) -> LmHead:
    served = read_model_config(weights).tied_head
    return LmHead(tying(source_tied), tying(stored_tied), tying(served))


@dataclass(frozen=True)
class Shards:
    """Result for the weight files.

    damaged: a sentence for each that differs from manifest.json, at most 20.
    """

    files: int
    bytes: int
    damaged: list[str]

    @property
    def passed(self) -> bool:
        return not self.damaged


def check_shards(reader: WeightReader) -> Shards:
    """Read every weight file and compare it with manifest.json, if there is one."""
    sizes = [reader.file_bytes(spec) for spec in reader.specs.values() for _ in reader.files(spec)]
    damaged: list[str] = []
    if reader.manifest is not None:
        with byte_progress("checking weight files", sum(sizes)) as progress:
            damaged = [problem for problem in reader.checksum_problems(progress)]
    return Shards(len(sizes), sum(sizes), damaged[:_MAX_DAMAGED])
