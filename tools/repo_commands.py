"""The commands `tridecode build-repo` and `tridecode check`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from tridecode.backend.errors import ConfigError


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
    ensemble_owner: Annotated[
        str, typer.Option(help="Contract of the model `ensemble`: fastertransformer or tensorrt_llm.")
    ] = "fastertransformer",
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
        Optional[list[Path]], typer.Option(help="NeMo archive of prompt learning; may be repeated.")
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
    from tridecode.tools.build_repo import build_repo as build

    build(
        model,
        output,
        tensor_para_size=tp,
        pipeline_para_size=pp,
        dtype=dtype,
        ensemble_owner=ensemble_owner,
        decoupled_fastertransformer=decoupled_fastertransformer,
        plain_text=plain_text,
        unbatched_text=unbatched_text,
        exclude_input=exclude_input,
        uint32_text_inputs=uint32_text_inputs,
        model_name=model_name,
        tokenizer=tokenizer,
        lora=lora,
        parity=parity,
        reference=reference,
        num_heads=num_heads,
        prompts=prompts or [],
        overwrite=overwrite,
        engine_settings=_settings(setting or []),
    )


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
    from tridecode.tools.check_repo import check_repo

    findings = check_repo(repository, checksums=checksums)
    for finding in findings:
        colour = typer.colors.RED if finding.severity == "error" else typer.colors.YELLOW
        typer.secho(str(finding), fg=colour)
    errors = sum(finding.severity == "error" for finding in findings)
    typer.echo(f"{repository}: errors: {errors}, warnings: {len(findings) - errors}")
    if errors:
        raise typer.Exit(1)
