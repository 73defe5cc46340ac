"""Options shared by commands of `tridecode bench`, and the Job that they describe."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tridecode.backend.base.errors import ConfigError

if TYPE_CHECKING:
    from tridecode.tools.bench.measure import Job


def _check_preset(name: str) -> str:
    """Check the preset before torch is imported."""
    from tridecode.tools.bench.shapes.presets import check_preset

    check_preset(name)
    return name


Preset = Annotated[
    str,
    typer.Option(
        help="Random weights of this shape: bloom-7b1, bloom-560m, llama-3-8b, smollm2-135m, gpt2, toy.",
        callback=_check_preset,
    ),
]
Model = Annotated[Path | None, typer.Option(help="Repository or weight directory instead of the preset.")]
Dtype = Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; default: the preset's.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Batches = Annotated[
    str | None,
    typer.Option(
        help="Concurrent sequences, separated by commas; one number (16) with --prompts or --workload."
    ),
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputTokens = Annotated[int, typer.Option(min=2, help="New tokens of each sequence, never fewer.")]
WorkloadOutput = Annotated[
    int | None,
    typer.Option(min=2, help="New tokens of each sequence; default: 128, or the workload's."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions; the median is reported.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages, each on separate GPUs.")]
Tp = Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")]


def _check_output(folder: Path) -> Path:
    """Check the output folder before anything is measured."""
    from tridecode.tools.bench.reports.report import check_output

    check_output(folder)
    return folder


Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantise the preset's matrices: int8, fp8 or int4; with activations: w8a8-int8, w8a8-fp8, "
        "w8a8-fp8-blocks (128 x 128)."
    ),
]
Output = Annotated[Path, typer.Option(help="Folder for the JSON and the plot.", callback=_check_output)]
Prompts = Annotated[
    Path | None, typer.Option(help='Prompts from a JSON-lines file with "text" in each line.')
]
Workload = Annotated[str | None, typer.Option(help="Random prompts with the lengths of a data set: lambada.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Use only this many of --prompts or --workload.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer.json, its folder, or a repository with one.")
]
Int8Head = Annotated[bool, typer.Option("--int8-head", help="Quantise the head to int8.")]
Int8HeadInputs = Annotated[
    bool, typer.Option("--int8-head-inputs", help="Quantise the head and the rows that it reads to int8.")
]
CacheDtype = Annotated[str, typer.Option(help="dtype of the KV cache: auto, fp8 or int8.")]
DoorPython = Annotated[str | None, typer.Option(help="Python for Triton's models; it needs numpy < 2.")]
RESULTS = Path("build/bench")
_Number = TypeVar("_Number", int, float)


def job_of(
    preset: str,
    directory: Path | None,
    dtype: str | None,
    device: str,
    batches: str | None,
    sizes: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int | None,
    repeats: int,
    tp: int,
    prompts: Path | None = None,
    tokenizer: Path | None = None,
    workload: str | None = None,
    requests: int | None = None,
    quantization: str | None = None,
) -> "Job":
    from tridecode.tools.bench import jobs
    from tridecode.tools.bench.load.workloads import LAMBADA_OUTPUT

    if prompts is not None and workload is not None:
        raise ConfigError("--prompts and --workload are two sources of prompts; wanted one of them")
    if batches is not None:
        sizes = numbers(batches)
    elif prompts is not None or workload is not None:
        sizes = (16,)
    job = jobs.make_job(
        preset,
        directory,
        dtype,
        device=device,
        batches=sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens or (LAMBADA_OUTPUT if workload else 128),
        repeats=repeats,
        tensor_para_size=tp,
        quantization=quantization or "",
    )
    if prompts is not None:
        return jobs.with_prompts(job, prompts, tokenizer, requests)
    return job if workload is None else jobs.with_workload(job, workload, requests)


def numbers(text: str) -> tuple[int, ...]:
    return _list_of(int, text, "whole numbers of 1 or more, e.g. 1,8,64", 1)


def rates(text: str | None) -> tuple[float, ...]:
    return () if text is None else _list_of(float, text, "requests per second, e.g. 0.5,2,8", 1e-9)


def _list_of(kind: Callable[[str], _Number], text: str, wanted: str, least: float) -> tuple[_Number, ...]:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not min(values) >= least:
        raise ConfigError(f"{text!r} is not a list of {wanted}")
    return values
