"""The commands `tridecode build-repo` and `tridecode check`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

_source = partial(typer.Option, rich_help_panel="The source")
_contracts = partial(typer.Option, rich_help_panel="Contracts and models")
_quantised = partial(typer.Option, rich_help_panel="Quantisation")
_compared = partial(typer.Option, rich_help_panel="Comparison with the source")


def build_repo(
    model: Annotated[
        str, typer.Option(help="Checkpoint: a directory, a file or a hub id (docs/reference/sources.md).")
    ],
    output: Annotated[Path, typer.Option(help="The model repository to write.")],
    tp: Annotated[int, typer.Option(min=1, help="tensor_para_size: GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline_para_size: stages of layers.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, fp16 or bf16; default: the checkpoint's with a GPU, fp32 without."),
    ] = None,
    for_clients: Annotated[
        str | None,
        _contracts(
            "--for",
            metavar="CLIENTS",
            help="fastertransformer, trtllm or vllm: sets --contract and --ensemble-owner for their clients.",
        ),
    ] = None,
    contract: Annotated[
        list[str] | None,
        _contracts(
            metavar="NAME[,NAME...]",
            help="Contracts to serve (docs/guides/clients.md); default: fastertransformer,tensorrt_llm.",
        ),
    ] = None,
    owner: Annotated[
        list[str] | None,
        _contracts(
            metavar="CONTRACT[,CONTRACT...]",
            help="Contract that keeps a model name used by several contracts.",
        ),
    ] = None,
    ensemble_owner: Annotated[str, _contracts(help="The same, only for the model `ensemble`.")] = "",
    decoupled: Annotated[
        list[str] | None,
        _contracts(metavar="CONTRACT", help="Contract whose usual model names stream; may be repeated."),
    ] = None,
    decoupled_fastertransformer: Annotated[
        bool, _contracts("--decoupled-fastertransformer", help="`fastertransformer` itself streams.")
    ] = False,
    plain_text: Annotated[
        bool,
        _contracts("--plain-text", help="The text model sends one response; its sibling _streaming streams."),
    ] = False,
    unbatched_text: Annotated[
        bool,
        _contracts("--unbatched-text", help="Add a text model, _unbatched, for shapes [1], not [1, 1]."),
    ] = False,
    exclude_input: Annotated[
        bool,
        _contracts("--exclude-input", help="Answers of text models omit the prompt by default."),
    ] = False,
    uint32_text_inputs: Annotated[
        bool,
        _contracts("--uint32-text-inputs", help="max_tokens, top_k, beam_width as UINT32 (LangChain)."),
    ] = False,
    wrap_token_ids: Annotated[
        bool,
        _contracts("--wrap-token-ids", help="`tensorrt_llm` takes ids modulo the vocabulary size."),
    ] = False,
    vllm_model: Annotated[
        str, _contracts(metavar="NAME", help="Name of the model with vLLM's contract.")
    ] = "vllm_model",
    stand_ins: Annotated[
        bool,
        _contracts(
            "--stand-ins",
            help="Add placeholders for models of other contracts; they answer with the option to build them.",
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Engine parameter, e.g. max_sequences=128."),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="model_name in config.ini; default: the checkpoint's name.")
    ] = None,
    tokenizer: Annotated[Path | None, _source(help="Take the tokenizer from this folder.")] = None,
    lora: Annotated[
        Path | None, _source(help="Merge the LoRA adapter of this folder (PEFT's layout).")
    ] = None,
    draft: Annotated[
        str | None,
        _source(
            metavar="CHECKPOINT",
            help="Drafter for speculative decoding: a checkpoint or repository with the same tokenizer, or a "
            "folder of `train-draft` (docs/guides/speculation.md).",
        ),
    ] = None,
    parity: Annotated[
        bool, _compared(help="Compare the result with transformers and write PARITY.json.")
    ] = True,
    reference: Annotated[
        str | None,
        _compared(help="Compare with this checkpoint, from which the weight directory was made."),
    ] = None,
    num_heads: Annotated[
        int | None,
        _source(min=1, help="Attention heads, if a Megatron checkpoint does not have their number."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        _source(help="NeMo archive or PEFT folder of prompt learning; may be repeated."),
    ] = None,
    quantize: Annotated[
        str | None,
        _quantised(
            metavar="FORMAT",
            help="Format of the layers' matrices. int8: calibrated if the model can run. Rounded to nearest: "
            "int8-nearest, int4, fp8; with 8-bit activations: w8a8-int8, w8a8-fp8, w8a8-fp8-blocks "
            "(docs/guides/quantization.md). Calibrated: int8, fp8, int4 or one of w8a8 with -gptq, int4-awq, "
            "int4-awq-gptq, int4-tuned (the most accurate int4, and the slowest to build), smoothquant, "
            "smoothquant-gptq (docs/guides/calibration.md). none: dequantise the checkpoint.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        _quantised(metavar="JSONL", help="Texts to calibrate with; default: a short built-in one."),
    ] = None,
    quantize_group: Annotated[
        int, _quantised(min=8, max=65536, help="int4: inputs that share a scale and a zero.")
    ] = 128,
    tune_steps: Annotated[
        int,
        _quantised(
            min=1,
            max=100_000,
            help="int4-tuned: training steps per layer; two thirds as many then train all layers together. "
            "Fewer steps are less accurate.",
        ),
    ] = 300,
    quantize_floor: Annotated[
        str,
        _quantised(
            metavar="KL,SHARE",
            help="Refuse a quantised model with a higher mean KL (nats) or fewer equal greedy tokens.",
        ),
    ] = "0.5,0.5",
    parity_text: Annotated[
        Path | None,
        _compared(metavar="JSONL", help="Also compare on these texts, up to 4,096 tokens (PARITY.json)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing repository at --output.")
    ] = False,
) -> None:
    """Convert a checkpoint into a Triton model repository.

    The repository appears only after it has matched transformers on fixed prompts (see PARITY.json).

    \b
    Example:
      tridecode build-repo --model bigscience/bloom-560m --output models --set max_sequences=128
    """
    from tridecode.tools.build_repo import options  # without torch

    contracts, ensemble_owner = options.contracts_of(for_clients, options.names(contract), ensemble_owner)
    models: dict[str, Any] = {
        "contracts": contracts,
        "owners": options.names(owner),
        "ensemble_owner": ensemble_owner,
        "decoupled": options.names(decoupled),
        "decoupled_fastertransformer": decoupled_fastertransformer,
        "plain_text": plain_text,
        "unbatched_text": unbatched_text,
        "exclude_input": exclude_input,
        "uint32_text_inputs": uint32_text_inputs,
        "wrap_token_ids": wrap_token_ids,
        "stand_ins": stand_ins,
        "vllm_model": vllm_model,
    }
    settings = options.settings_of(setting)
    degree = {"tensor_para_size": tp, "pipeline_para_size": pp}
    options.check_repository(output, overwrite, dtype, models, {**settings, **degree})
    quantization = options.quantization_of(quantize, quantize_group)
    texts = options.calibration_texts(quantize, calibrate)
    compared_text = options.given_text(parity_text, parity)
    floor = options.floor_of(quantize_floor)
    options.check_sources({"--tokenizer": tokenizer, "--lora": lora}, prompts or [])
    source = options.source_path(model)
    other = None if reference is None else options.source_path(reference)
    drafting = None if draft is None else options.source_path(draft)
    if for_clients is not None:
        typer.echo(f"--for {for_clients}: {options.PRESETS[for_clients].options()}")

    from tridecode.tools.build_repo.build import build_repo as build
    from tridecode.tools.build_repo.calibration import calibration_by

    build(
        source,
        output,
        tensor_para_size=tp,
        pipeline_para_size=pp,
        dtype=dtype,
        **models,
        model_name=model_name,
        tokenizer=tokenizer,
        lora=lora,
        parity=parity,
        reference=other,
        num_heads=num_heads,
        prompts=prompts or [],
        overwrite=overwrite,
        quantization=quantization,
        keep_quantization=quantize != "none",
        calibration=calibration_by(quantize, quantize_group, tune_steps, texts),
        parity_text=compared_text,
        quantization_floor=floor,
        engine_settings=settings,
        draft=drafting,
    )


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
    from tridecode.tools.checks.findings import no_repository

    findings = [no_repository(repository)]
    if repository.is_dir():
        from tridecode.tools.checks.repository import check_repo  # imports torch

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
