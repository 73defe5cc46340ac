"""A sentencepiece model, tokenizer.model, as a tokenizer of the tokenizers library.

transformers has the same conversion, but not for a folder without its own files, and only with the protobuf
version that the sentencepiece package was built for. Compared with sentencepiece on the probes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from transformers.utils import sentencepiece_model_pb2_new as model_pb2

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES, read_json, require_file
from tridecode.backend.base.errors import CheckpointError, UnsupportedError

MODEL_FILE = "tokenizer.model"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _USER_DEFINED = 3, 4  # SentencePiece.Type
_SPACE = "▁"


def load_sentencepiece(directory: Path, probes: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of directory/tokenizer.model; a tokenizer_config.json says whether BOS and EOS are added.

    Raises CheckpointError for a file that is damaged, or that splits a probe differently from sentencepiece;
    UnsupportedError for a model that is neither BPE nor unigram.
    """
    path = require_file(directory / MODEL_FILE, MAX_JSON_BYTES)
    proto = model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # protobuf's DecodeError and sentencepiece's RuntimeError
        raise CheckpointError(
            f"{path} is not a sentencepiece model: {' '.join(str(error).split())}"
        ) from None
    settings: Mapping[str, Any] = {}
    if (directory / "tokenizer_config.json").is_file():
        settings = read_json(directory / "tokenizer_config.json")
    tokenizer = _convert(proto, path)
    for probe in probes:
        found, wanted = tokenizer.encode(probe).ids, original.encode(probe)
        if found != wanted:
            raise CheckpointError(
                f"{path}: {probe!r} would be split into {found}; sentencepiece has {wanted}"
            )
    pieces = [piece.piece for piece in proto.pieces]
    numbers = {"bos_token": original.bos_id(), "eos_token": original.eos_id(), "unk_token": original.unk_id()}
    special = {name: pieces[number] for name, number in numbers.items() if 0 <= number < len(pieces)}
    _add_later_tokens(tokenizer, settings, path)
    is_llama = str(settings.get("tokenizer_class", "")).startswith("Llama")
    bos = special.get("bos_token") if settings.get("add_bos_token", is_llama) else None
    eos = special.get("eos_token") if settings.get("add_eos_token", False) else None
    if bos or eos:
        parts = [part for part in (bos, "$A", eos) if part]
        ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    template = settings.get("chat_template")
    if isinstance(template, str):
        special["chat_template"] = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _convert(proto: Any, path: Path) -> Tokenizer:
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    unknown = next((piece.piece for piece in proto.pieces if piece.type == 2), None)
    if trainer.model_type == _BPE:
        vocabulary = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        scores = {piece.piece: piece.score for piece in proto.pieces}
        named = {piece.piece for piece in proto.pieces if piece.type in (2, _CONTROL, _USER_DEFINED)}
        merges = generate_merges(vocabulary, scores, named)
        model: Any = models.BPE(
            vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
    elif trainer.model_type == _UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        model = models.Unigram(scored, trainer.unk_id, trainer.byte_fallback)
    else:
        raise UnsupportedError(f"{path} is neither a BPE nor a unigram model of sentencepiece")
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    for piece in proto.pieces:
        if piece.type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(piece.piece, normalized=False, special=True)])
        elif piece.type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False)])
    return tokenizer


def _add_later_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Add the tokens that tokenizer_config.json adds to the model's.

    CheckpointError if the ids have a gap.
    """
    added = settings.get("added_tokens_decoder")
    listed = added.items() if isinstance(added, dict) else ()
    for number, token in sorted((int(key), value) for key, value in listed if str(key).isdigit()):
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or tokenizer.token_to_id(content) == number:
            continue
        tokenizer.add_tokens([AddedToken(content, normalized=False, special=bool(token.get("special")))])
        if tokenizer.token_to_id(content) != number:
            raise CheckpointError(
                f"{path.parent}/tokenizer_config.json adds {content!r} as {number}; it would be "
                f"{tokenizer.token_to_id(content)}"
            )
