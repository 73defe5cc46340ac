"""Builds a complete Triton model repository from a checkpoint, after comparing it with transformers."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.backend.configuration.engine_config import read_engine_config
from tridecode.backend.configuration.model_config import ModelConfig, check_ranks
from tridecode.backend.models import check_context, family
from tridecode.backend.weights.draft_files import kind_of
from tridecode.backend.weights.lora import CONFIG_FILE as PEFT_CONFIG
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.adapters import merge, write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.kept_quantized import kept_or_dense
from tridecode.converters.parity.grades import Floor
from tridecode.converters.pruning.zeros import zeros_summary
from tridecode.converters.quantize.texts import GivenText
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.nemo import open_prompts
from tridecode.converters.sources.peft_prompts import open_peft_prompt
from tridecode.converters.sources.quantized import QuantizedSource
from tridecode.converters.tokenizers.files import has_tokenizer, load_tokenizer, save_tokenizer
from tridecode.converters.tokenizers.vocabulary import vocabulary_size
from tridecode.model_repo_templates.repository import (
    ADAPTERS_DIR,
    DRAFT_DIR,
    engine_texts,
    repository_models,
    tokenizer_dir,
    write_models,
)
from tridecode.model_repo_templates.served import ENGINE_MODEL, RepositoryModel
from tridecode.tools.build_repo.calibration import Calibration, calibrated, usable
from tridecode.tools.build_repo.draft import Draft, plain_tokenizer, plan_draft, with_draft
from tridecode.tools.build_repo.proof import no_comparison, prove, say_grade, say_unproven
from tridecode.tools.build_repo.staging import check_output, existing_parent, staged, staged_bytes
from tridecode.tools.build_repo.trained import TrainedFiles, plan_trained
from tridecode.tools.checks.repository import check_repo

CALIBRATED = "calibrated"  # folder of the repository during the build
_SPARSE = 0.01  # share of zeros from which a model counts as pruned


def build_repo(
    model: str | Path,
    output: str | Path,
    *,
    tensor_para_size: int = 1,
    pipeline_para_size: int = 1,
    dtype: str | None = None,
    model_name: str | None = None,
    tokenizer: str | Path | None = None,
    lora: str | Path | None = None,
    parity: bool = True,
    reference: str | Path | None = None,
    num_heads: int | None = None,
    prompts: Sequence[str | Path] = (),
    overwrite: bool = False,
    quantization: Quantization | None = None,
    keep_quantization: bool = True,
    quantization_floor: Floor = Floor(),
    calibration: Calibration | None = None,
    parity_text: GivenText | None = None,
    engine_settings: Mapping[str, object] | None = None,
    draft: str | Path | None = None,
    console: Console | None = None,
    **models_arguments: Any,
) -> Path:
    """Convert `model` and write the repository `output`, completely or not at all. Returns its path.

    model: a Hugging Face directory, a .gguf file or a hub id. dtype: of the weight files and of the engine;
    None: the checkpoint's on a machine with a GPU, fp32 on one without. tokenizer: a directory to take the
    tokenizer from instead of the model. lora: folder of a LoRA adapter to merge into the weights.
    models_arguments: contracts and the other arguments of repository_models. engine_settings: parameters of
    EngineConfig. draft: a draft model or a trained drafter, see plan_draft and plan_trained. parity: compare
    with transformers and write PARITY.json. reference: another checkpoint to compare with; for a weight
    directory, the one that it was made from. num_heads: attention heads, for a Megatron checkpoint that does
    not record them. prompts: NeMo's archives of prompt learning and PEFT's folders. overwrite: an output that
    is a model repository is replaced. quantization: quantise the matrices to it by rounding to nearest.
    keep_quantization: matrices of a quantised checkpoint stay unchanged if weight directories support their
    format. quantization_floor: quality that the result must then reach. calibration: quantise by its method,
    instead of `quantization`. parity_text: also compare on these texts.

    Raises CheckpointError, ConfigError or UnsupportedError with what was found and wanted, and removes its
    files.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    output = Path(output)
    check_output(output, overwrite)
    models = partial(repository_models, **models_arguments)
    models()  # wrong settings are refused before anything is read
    checkpoint = open_checkpoint(model, num_heads)
    for learned in map(Path, prompts):
        is_peft = (learned / PEFT_CONFIG).exists()
        checkpoint.prompts += [open_peft_prompt(learned)] if is_peft else open_prompts(learned)
    if lora is not None and checkpoint.plan is not None:
        raise ConfigError(
            f"{checkpoint.path} is a weight directory; --lora wants the checkpoint it was made from"
        )
    if lora is not None:
        checkpoint = merge(checkpoint, Path(lora))
    for note in checkpoint.notes:
        console.print("[yellow]warning[/]: ", end="")
        console.print(note, markup=False)
    if calibration is not None:
        quantization = calibration.method.quantization
    planned = plan_conversion(checkpoint, dtype or _default_dtype(console), model_name, quantization)
    how = f"matrices of layers: {quantization.weights}, rounded to nearest" if quantization else ""
    if isinstance(checkpoint.tensors, QuantizedSource) and quantization is None and keep_quantization:
        planned, how = kept_or_dense(planned)
    compared = checkpoint if reference is None else open_checkpoint(reference)
    config = planned.config
    console.print(
        f"{checkpoint.path}: {config.family}, {config.num_layers} layers of {config.hidden_size}, vocabulary "
        f"{config.vocab_size}; weights as {config.weight_dtype}, tensor_para_size {tensor_para_size}"
    )
    if how and calibration is None:
        console.print(how, markup=False)
    for note in planned.notes:
        console.print(note)
    for number, table in enumerate(checkpoint.prompts):
        console.print(f"prompt task {number}: {table.task}, {table.shape[0]} positions", markup=False)
    check_ranks(config, tensor_para_size, pipeline_para_size)
    settings = {
        "data_type": config.weight_dtype,
        "lora_path": ADAPTERS_DIR,
        **(engine_settings or {}),
        "tensor_para_size": tensor_para_size,
        "pipeline_para_size": pipeline_para_size,
    }
    trained = "" if draft is None else kind_of(Path(draft))
    settings = with_draft(settings, draft, trained)
    engine = engine_texts(settings, "engine settings")
    _check_length(engine, config, console)
    hf_tokenizer = _tokenizer(
        checkpoint, Path(tokenizer) if tokenizer is not None else None, models(has_tokenizer=False), console
    )
    calibration = usable(calibration, planned, hf_tokenizer, console)
    chosen = models(has_tokenizer=hf_tokenizer is not None)
    folder = Path(ENGINE_MODEL) / "1" / f"{tensor_para_size}-gpu"
    drafting: Draft | TrainedFiles | None = None
    if draft is not None and trained:
        drafting = plan_trained(draft, trained, config, pipeline_para_size, console)
    elif draft is not None:
        longest = read_engine_config(dict(engine), "engine settings").max_sequence_tokens or 0
        drafting = plan_draft(draft, config, tensor_para_size, longest, console)
        if hf_tokenizer is not None:
            drafting.check_tokenizer(plain_tokenizer(hf_tokenizer))
    more = 0 if drafting is None else drafting.total_bytes
    _check_room(output, planned, folder, 1 if calibration is None else 2, more)
    with staged(output, folder) as staging:
        weights = staging / folder
        if calibration is not None:  # its files are removed with its last use
            planned = calibrated(planned, calibration, hf_tokenizer, console, staging / CALIBRATED)
        manifest = planned.write(weights, tensor_para_size)
        shutil.rmtree(staging / CALIBRATED, ignore_errors=True)
        folds = calibration is not None and calibration.method.folds
        # adapters name transformers' modules, which a weight directory lacks; folded modules have other
        # inputs
        if checkpoint.plan is None and not folds:
            write_targets(weights, planned)
        if manifest.weight_sparsity >= _SPARSE:
            console.print(zeros_summary(manifest))
        write_models(
            staging,
            chosen,
            engine=engine,
            model_type=family(config.family).model_type,
            checkpoint_path=weights.name,
            stop_ids="",  # config.ini has all end tokens
        )
        tokenizer_file = None
        if hf_tokenizer is not None:
            tokenizer_file = staging / tokenizer_dir(chosen) / "tokenizer.json"
            source = Path(tokenizer) if tokenizer is not None else checkpoint.tokenizer_dir
            written = save_tokenizer(hf_tokenizer, source, tokenizer_file.parent)
            _check_vocabulary(written, config, console)
            _check_end(written, hf_tokenizer.eos_token, checkpoint.eos_ids, console)
        if drafting is not None:
            drafting.write(staging / ENGINE_MODEL / DRAFT_DIR, tensor_para_size)
        why = no_comparison(compared, config) if parity else ""
        if why:
            say_unproven(why, planned, compared, weights, staging, tokenizer_file, console)
        elif parity:
            floor = quantization_floor
            proven = prove(
                planned, compared, weights, staging, tokenizer_file, hf_tokenizer, console, floor, parity_text
            )
            say_grade(proven, "" if calibration is None else calibration.method.name, console)
        _check_result(staging)
    console.print(f"wrote {output}")
    console.print(f"next: {serve_command(output)}", markup=False)
    return output


def _tokenizer(
    checkpoint: Checkpoint, given: Path | None, without: Sequence[RepositoryModel], console: Console
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the checkpoint or of the folder `given`; None, with a warning, if there is
    none.

    without: the models of a repository without a tokenizer.
    """
    if given is not None or has_tokenizer(checkpoint):
        return load_tokenizer(checkpoint, given)
    names = ", ".join(model.name for model in without)
    console.print(
        f"[yellow]warning[/]: {checkpoint.path} has no tokenizer: the repository gets the models of token "
        f"ids only ({names}); name a tokenizer's folder (--tokenizer) for those of text"
    )
    return None


def serve_command(repository: Path) -> str:
    """The command that serves a repository, with the path of `tridecode` if it is not on the PATH."""
    program = "tridecode"
    if not shutil.which(program):
        script = Path(sys.executable).with_name(program)
        found = (
            [os.path.relpath(script)] if script.exists() else [sys.executable, "-m", "tridecode.tools.cli"]
        )
        program = shlex.join(found)
    return f"{program} serve {shlex.quote(str(repository))}"


def _check_room(output: Path, planned: PlannedConversion, folder: Path, copies: int, more: int) -> None:
    """Raise ConfigError if the disk has less space than the weights need; tokenizer and configs are small.

    copies: additional copies of the matrices; calibration keeps one until the weights are written. more:
    bytes of the draft model.
    """
    wanted = copies * planned.total_bytes + more - staged_bytes(output, folder)
    free = shutil.disk_usage(existing_parent(output)).free
    if wanted > free:
        raise ConfigError(f"{output} needs {wanted:,} bytes for weights; its disk has {free:,} free")


def _default_dtype(console: Console) -> str | None:
    if torch.cuda.is_available():
        console.print("dtype: the checkpoint's, because this machine has a GPU")
        return None
    console.print("dtype: fp32, because this machine has no GPU (a CPU is fastest in it)")
    return "fp32"


def _check_length(engine: Mapping[str, str], config: ModelConfig, console: Console) -> None:
    """Raise ConfigError if the model cannot compute max_sequence_tokens; warn beyond its positions."""
    longest = read_engine_config(dict(engine), "engine settings").max_sequence_tokens or 0
    check_context(config, longest)
    if longest > config.max_positions:
        console.print(
            f"[yellow]warning[/]: max_sequence_tokens {longest:,} is beyond the model's "
            f"{config.max_positions:,} positions; its answers to longer texts may be poor"
        )


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, console: Console) -> None:
    base, size = vocabulary_size(tokenizer, with_added_tokens=False), vocabulary_size(tokenizer)
    last = f"the model's vocabulary ends at {config.vocab_size - 1}"
    if base > config.vocab_size:
        raise CheckpointError(f"the tokenizer has ids up to {base - 1}; {last}")
    if size > config.vocab_size:
        found = (
            f"the tokenizer adds ids up to {size - 1}; {last}, and a prompt with such an id will be refused"
        )
        console.print(f"[yellow]warning[/]: {found}")


def _check_end(tokenizer: Tokenizer, token: str | None, end_ids: list[int], console: Console) -> None:
    """Warn where the tokenizer's end token is not one of the model's end ids."""
    found = tokenizer.token_to_id(str(token)) if token is not None else None
    if found is not None and end_ids and found not in end_ids:
        wanted = ", ".join(map(str, end_ids[:10]))
        console.print(
            f"[yellow]warning[/]: the tokenizer's eos_token is {str(token)[:60]!r}, id {found}; texts end at "
            f"{wanted} (generation_config.json, else config.json), and the model may not stop at {found}",
            markup=True,
        )


def _check_result(staging: Path) -> None:
    errors = [finding for finding in check_repo(staging) if finding.severity == "error"]
    if errors:
        raise ConfigError(f"the repository does not pass its own check: {errors[0]}")
