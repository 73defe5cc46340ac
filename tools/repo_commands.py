"""The commands `tridecode build-repo` and `tridecode check`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tridecode.backend.errors import ConfigError

if TYPE_CHECKING:
    from tridecode.backend.quantization import Quantization
    from tridecode.converters.parity_text import GivenText
    from tridecode.converters.quantized_parity import Floor
    from tridecode.tools.calibration import Calibration


def build_repo(
    model: Annotated[
        str, typer.Option(help="Checkpoint: a directory, a file or a hub id (docs/sources.md).")
    ],
    output: Annotated[Path, typer.Option(help="The model repository to write.")],
    tp: Annotated[int, typer.Option(min=1, help="tensor_para_size: GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline_para_size: stages of layers.")] = 1,
    dtype: Annotated[
        Optional[str],
        typer.Option(help="fp32, fp16 or bf16; default: the checkpoint's with a GPU, fp32 without."),
    ] = None,
    contract: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Contracts to serve (docs/clients.md); default: fastertransformer,tensorrt_llm.",
        ),
    ] = None,
    owner: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="CONTRACT[,CONTRACT...]", help="Keeps a model's name that several contracts have."
        ),
    ] = None,
    ensemble_owner: Annotated[str, typer.Option(help="The same for the model `ensemble` only.")] = "",
    decoupled: Annotated[
        Optional[list[str]],
        typer.Option(metavar="CONTRACT", help="Its models stream under their usual names; may be repeated."),
    ] = None,
    decoupled_fastertransformer: Annotated[
        bool, typer.Option("--decoupled-fastertransformer", help="`fastertransformer` itself streams.")
    ] = False,
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="The text model gives one response; _streaming streams.")
    ] = False,
    unbatched_text: Annotated[
        bool,
        typer.Option("--unbatched-text", help="Add a text model, _unbatched, for shapes [1], not [1, 1]."),
    ] = False,
    exclude_input: Annotated[
        bool,
        typer.Option("--exclude-input", help="Text models leave the prompt out of answers by default."),
    ] = False,
    uint32_text_inputs: Annotated[
        bool,
        typer.Option("--uint32-text-inputs", help="max_tokens, top_k, beam_width as UINT32 (LangChain)."),
    ] = False,
    wrap_token_ids: Annotated[
        bool,
        typer.Option("--wrap-token-ids", help="`tensorrt_llm` takes ids beyond the vocabulary modulo it."),
    ] = False,
    vllm_model: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the model with vLLM's contract.")
    ] = "vllm_model",
    stand_ins: Annotated[
        bool,
        typer.Option(
            "--stand-ins",
            help="Also models of the other contracts, which answer with the option to build them.",
        ),
    ] = False,
    setting: Annotated[
        Optional[list[str]],
        typer.Option("--set", metavar="KEY=VALUE", help="Engine parameter, e.g. max_sequences=128."),
    ] = None,
    model_name: Annotated[
        Optional[str], typer.Option(help="model_name in config.ini; default: the checkpoint's name.")
    ] = None,
    tokenizer: Annotated[Optional[Path], typer.Option(help="Take the tokenizer from this folder.")] = None,
    lora: Annotated[
        Optional[Path], typer.Option(help="Merge the LoRA adapter of this folder (PEFT's layout).")
    ] = None,
    parity: Annotated[
        bool, typer.Option(help="Compare the result with transformers and write PARITY.json.")
    ] = True,
    reference: Annotated[
        Optional[str],
        typer.Option(help="Compare with this checkpoint: the one that a weight directory was made from."),
    ] = None,
    num_heads: Annotated[
        Optional[int], typer.Option(min=1, help="Attention heads of a Megatron checkpoint that does not say.")
    ] = None,
    prompts: Annotated[
        Optional[list[Path]],
        typer.Option(help="NeMo archive or PEFT folder of prompt learning; may be repeated."),
    ] = None,
    quantize: Annotated[
        Optional[str],
        typer.Option(
            metavar="FORMAT",
            help="Layers' matrices rounded to int8, int4 or fp8, with products in 8 bit to w8a8-int8, "
            "w8a8-fp8 or w8a8-fp8-blocks (docs/quantization.md); or calibrated: int4-awq, int4-tuned (of the "
            "int4 methods the one with the least divergence, and the slowest to make), smoothquant, "
            "smoothquant-gptq, or one of those with -gptq behind it (docs/calibration.md); none: expand "
            "quantised ones.",
        ),
    ] = None,
    calibrate: Annotated[
        Optional[Path],
        typer.Option(metavar="JSONL", help="Texts to calibrate with; default: a short built-in one."),
    ] = None,
    quantize_group: Annotated[
        int, typer.Option(min=8, max=65536, help="int4: inputs that share a scale and a zero.")
    ] = 128,
    tune_steps: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            help="int4-tuned: steps for each layer, and two thirds as many for all together; fewer are less "
            "accurate.",
        ),
    ] = 300,
    quantize_floor: Annotated[
        str,
        typer.Option(
            metavar="KL,SHARE",
            help="Refuse a quantised model with a higher mean KL (nats) or fewer equal greedy tokens.",
        ),
    ] = "0.5,0.5",
    parity_text: Annotated[
        Optional[Path],
        typer.Option(metavar="JSONL", help="Compare on these texts, too: up to 4,096 tokens (PARITY.json)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the repository that exists at --output.")
    ] = False,
) -> None:
    """Convert a checkpoint into a Triton model repository.

    The repository appears only after it has matched transformers on fixed prompts (see PARITY.json).

    \b
    Example:
      tridecode build-repo --model bigscience/bloom-560m --output models --set max_sequences=128
    """
    from tridecode.model_repo_templates.served import DEFAULT
    from tridecode.tools.build_repo import build_repo as build

    calibration = _calibration(quantize, quantize_group, calibrate, tune_steps)
    given_text = _given_text(parity_text, parity)
    build(
        model,
        output,
        tensor_para_size=tp,
        pipeline_para_size=pp,
        dtype=dtype,
        contracts=_names(contract) or DEFAULT,
        owners=_names(owner),
        ensemble_owner=ensemble_owner,
        decoupled=_names(decoupled),
        decoupled_fastertransformer=decoupled_fastertransformer,
        plain_text=plain_text,
        unbatched_text=unbatched_text,
        exclude_input=exclude_input,
        uint32_text_inputs=uint32_text_inputs,
        wrap_token_ids=wrap_token_ids,
        stand_ins=stand_ins,
        vllm_model=vllm_model,
        model_name=model_name,
        tokenizer=tokenizer,
        lora=lora,
        parity=parity,
        reference=reference,
        num_heads=num_heads,
        prompts=prompts or [],
        overwrite=overwrite,
        quantization=_quantization(quantize, quantize_group),
        keep_quantization=quantize != "none",
        calibration=calibration,
        parity_text=given_text,
        quantization_floor=_floor(quantize_floor),
        engine_settings=_settings(setting or []),
    )


def _quantization(format: Optional[str], group: int) -> "Optional[Quantization]":
    """None for a format that needs calibration, and for "none"."""
    from tridecode.backend.quantization import ROUNDED
    from tridecode.converters.quantize.methods import METHODS

    if format is None or format in ("none", *METHODS):
        return None
    if format not in ROUNDED:
        raise ConfigError(f"--quantize {format}: wanted one of {', '.join((*ROUNDED, *METHODS))}, none")
    found = ROUNDED[format]
    return replace(found, group=group) if found.weights == "int4" else found


def _calibration(
    format: Optional[str], group: int, file: Optional[Path], steps: int
) -> "Optional[Calibration]":
    """None for a format that needs no calibration."""
    if format is None and file is None:
        return None
    from tridecode.converters.quantize.methods import METHODS, method_of
    from tridecode.converters.quantize.tune import Tuning
    from tridecode.tools.calibration import read_calibration

    if format in METHODS:
        return read_calibration(
            method_of(str(format), group, Tuning(steps, together_steps=-(-2 * steps // 3))), file
        )
    if file is not None:
        raise ConfigError(f"--calibrate {file} with --quantize {format}; wanted one of {', '.join(METHODS)}")
    return None


def _given_text(file: Optional[Path], parity: bool) -> "Optional[GivenText]":
    if file is None:
        return None
    if not parity:
        raise ConfigError(f"--parity-text {file} with --no-parity: nothing would be compared")
    from tridecode.converters.parity_text import read_given_text

    return read_given_text(file)


def _floor(text: str) -> "Floor":
    from tridecode.converters.quantized_parity import Floor

    try:
        mean_kl, agreement = map(float, text.split(","))
    except ValueError:
        mean_kl = agreement = -1.0
    if not (mean_kl >= 0 and 0 <= agreement <= 1):
        wanted = "KL,SHARE with KL in nats from 0 and SHARE from 0 to 1, e.g. 0.5,0.5"
        raise ConfigError(f"--quantize-floor {text}: wanted {wanted}")
    return Floor(mean_kl, agreement)


def _names(texts: Optional[list[str]]) -> list[str]:
    """The names of options such as `--contract a,b --contract c`."""
    return [name.strip() for text in texts or [] for name in text.split(",") if name.strip()]


def _settings(texts: list[str]) -> dict[str, str]:
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text}: wanted KEY=VALUE, e.g. --set max_sequences=128")
        settings[key.strip()] = value.strip()
    return settings


def check(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Also read every weight file and compare its SHA-256.")
    ] = False,
) -> None:
    """Find faults in a model repository.

    Reads files only. Exit code: 0 without errors (warnings allowed), 1 with errors.

    \b
    Example:
      tridecode check models --checksums
    """
    from tridecode.model_repo_templates.contracts_in import in_words
    from tridecode.tools.check_repo import check_repo

    findings = check_repo(repository, checksums=checksums)
    for finding in findings:
        colour = typer.colors.RED if finding.severity == "error" else typer.colors.YELLOW
        typer.secho(str(finding), fg=colour)
    errors = sum(finding.severity == "error" for finding in findings)
    if repository.is_dir():
        typer.echo(f"contracts: {in_words(repository)}")
    typer.echo(f"{repository}: errors: {errors}, warnings: {len(findings) - errors}")
    if errors:
        raise typer.Exit(1)
