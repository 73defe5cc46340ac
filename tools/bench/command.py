"""The commands of `tridecode bench`: tables on the terminal, JSON files and plots in a folder."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Callable, Optional, TypeVar

import typer

from tridecode.backend.base.errors import ConfigError

if TYPE_CHECKING:
    from tridecode.tools.bench.measure import Job

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure the engine, a server, or other engines.",
    epilog="Start with:  tridecode bench engine --preset toy",
)


def _check_preset(name: str) -> str:
    """Before torch is imported."""
    from tridecode.tools.bench.shapes.presets import preset

    preset(name)
    return name


_Preset = Annotated[
    str,
    typer.Option(
        help="Random weights of a true shape: bloom-7b1, bloom-560m, llama-3-8b, smollm2-135m, gpt2, toy.",
        callback=_check_preset,
    ),
]
_Model = Annotated[
    Optional[Path], typer.Option(help="A repository or weight directory in place of the preset.")
]
_Dtype = Annotated[Optional[str], typer.Option(help="fp32, fp16 or bf16; default: the preset's.")]
_Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_Batches = Annotated[
    Optional[str],
    typer.Option(
        help="Concurrent sequences, separated by commas; one number (16) with --prompts or --workload."
    ),
]
_PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
_OutputTokens = Annotated[int, typer.Option(min=2, help="New tokens of each sequence, never fewer.")]
_WorkloadOutput = Annotated[
    Optional[int],
    typer.Option(min=2, help="New tokens of each sequence; default: 128, or the workload's."),
]
_Repeats = Annotated[int, typer.Option(min=1, help="Repetitions; the median is reported.")]
_Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages, each on GPUs of its own.")]
_Tp = Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")]


def _check_output(folder: Path) -> Path:
    """Before anything is measured."""
    from tridecode.tools.bench.reports.report import check_output

    check_output(folder)
    return folder


_Quantization = Annotated[
    Optional[str],
    typer.Option(
        help="The preset's matrices rounded: int8, fp8 or int4; with the activations: w8a8-int8, w8a8-fp8, "
        "w8a8-fp8-blocks (128 x 128)."
    ),
]
_Output = Annotated[Path, typer.Option(help="Folder for the JSON and the plot.", callback=_check_output)]
_Prompts = Annotated[
    Optional[Path], typer.Option(help='Prompts from a JSON-lines file with "text" in each line.')
]
_Workload = Annotated[Optional[str], typer.Option(help="Random prompts with a data set's lengths: lambada.")]
_Requests = Annotated[
    Optional[int], typer.Option(min=1, help="Use only this many of --prompts or --workload.")
]
_Tokenizer = Annotated[
    Optional[Path], typer.Option(help="A tokenizer.json, its folder, or a repository that has one.")
]
_Int8Head = Annotated[bool, typer.Option("--int8-head", help="The head in int8.")]
_CacheDtype = Annotated[str, typer.Option(help="auto, fp8 or int8: of the cache.")]
_DoorPython = Annotated[Optional[str], typer.Option(help="Python of the server's models: numpy < 2.")]
_RESULTS = Path("build/bench")
_Number = TypeVar("_Number", int, float)


@app.command()
def engine(
    preset: _Preset = "smollm2-135m",
    model: _Model = None,
    dtype: _Dtype = None,
    device: _Device = "auto",
    batches: _Batches = None,
    prompt_tokens: _PromptTokens = 512,
    output_tokens: _WorkloadOutput = None,
    repeats: _Repeats = 3,
    tp: _Tp = 1,
    pp: _Pp = 1,
    kv_cache_dtype: _CacheDtype = "auto",
    prompts: _Prompts = None,
    tokenizer: _Tokenizer = None,
    workload: _Workload = None,
    requests: _Requests = None,
    quantization: _Quantization = None,
    int8_head: _Int8Head = False,
    output: _Output = _RESULTS,
) -> None:
    """Measure the engine alone, without a server.

    Time to the first token, milliseconds per step, tokens per second; greedy, fixed output lengths.

    \b
    Example:
      tridecode bench engine --preset bloom-7b1 --batches 1,8,64,256
    """
    from tridecode.tools.bench import compare

    job = _job(
        preset, model, dtype, device, batches, (1, 8, 64, 256), prompt_tokens, output_tokens, repeats, tp,
        prompts, tokenizer or model, workload, requests, quantization,
    )  # fmt: skip
    job = replace(job, kv_cache_dtype=kv_cache_dtype, int8_head=int8_head, pipeline_para_size=pp)
    compare.run_engine(job, output)


@app.command()
def server(
    preset: _Preset = "smollm2-135m",
    repository: Annotated[
        Optional[Path], typer.Option(help="A model repository in place of the preset.")
    ] = None,
    dtype: _Dtype = None,
    device: _Device = "auto",
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,64,256",
    prompt_tokens: _PromptTokens = 512,
    output_tokens: _OutputTokens = 128,
    repeats: _Repeats = 3,
    tp: _Tp = 1,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids through fastertransformer_streaming, not text.")
    ] = False,
    door_python: _DoorPython = None,
    output: _Output = _RESULTS,
) -> None:
    """Measure the server's overhead over the engine alone.

    Both run on this machine, one after the other; requests go over gRPC streams.

    \b
    Example:
      tridecode bench server --preset bloom-7b1 --streams 1,64,256
    """
    from tridecode.tools.bench import compare

    job = _job(preset, repository, dtype, device, streams, (), prompt_tokens, output_tokens, repeats, tp)
    compare.run_server(job, output, tokens_in=tokens, door_python=door_python)


@app.command("compare")
def compare_engines(
    preset: _Preset = "smollm2-135m",
    dtype: _Dtype = None,
    device: _Device = "auto",
    batches: _Batches = None,
    prompt_tokens: _PromptTokens = 512,
    output_tokens: _WorkloadOutput = None,
    repeats: _Repeats = 3,
    prompts: _Prompts = None,
    tokenizer: _Tokenizer = None,
    workload: _Workload = None,
    requests: _Requests = None,
    output: _Output = _RESULTS,
) -> None:
    """Compare our engine with transformers and vLLM on the same prompts.

    Each engine runs in its own process; vLLM only where it is installed.

    \b
    Example:
      tridecode bench compare --preset llama-3-8b --batches 1,8,64
      tridecode bench compare --preset bloom-7b1 --workload lambada
    """
    from tridecode.tools.bench import compare

    job = _job(
        preset, None, dtype, device, batches, (1, 8, 64), prompt_tokens, output_tokens, repeats, 1,
        prompts, tokenizer, workload, requests,
    )  # fmt: skip
    compare.run_compare(job, output)


@app.command()
def mix(
    preset: _Preset = "smollm2-135m",
    model: _Model = None,
    dtype: _Dtype = None,
    device: _Device = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the load.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")] = 256,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Poisson arrivals per second; 0: all requests at once.")
    ] = 0.0,
    repeats: _Repeats = 3,
    tp: _Tp = 1,
    kv_cache_dtype: _CacheDtype = "auto",
    quantization: _Quantization = None,
    int8_head: _Int8Head = False,
    output: _Output = _RESULTS,
) -> None:
    """Measure a load of chats: prompts and answers of many lengths.

    Prompts of about 180 tokens (16 to 1,024), answers of about 150 (4 to 512), of log-normal lengths. Our
    engine, step by step, and vLLM where it is installed.

    \b
    Example:
      tridecode bench mix --preset llama-3-8b
    """
    from tridecode.tools.bench import compare, jobs

    job = jobs.make_job(
        preset, model, dtype, device=device, batches=(slots,), repeats=repeats, tensor_para_size=tp,
        rate=rate, kv_cache_dtype=kv_cache_dtype, quantization=quantization or "", int8_head=int8_head,
    )  # fmt: skip
    compare.run_compare(jobs.with_mix(job, requests), output, "mix")


@app.command()
def beside(
    model: Annotated[
        Optional[str], typer.Option(help="Hugging Face directory or .gguf; default: SmolLM2-135M.")
    ] = None,
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,16,64",
    prompt_tokens: _PromptTokens = 64,
    output_tokens: _OutputTokens = 64,
    rounds: Annotated[
        int, typer.Option(min=1, help="Each engine runs once per round; medians are reported.")
    ] = 5,
    patience_s: Annotated[float, typer.Option(help="Repeat disturbed runs for this many seconds.")] = 0.0,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the converted repository.")] = Path("demo"),
    output: _Output = _RESULTS,
    name: Annotated[str, typer.Option(help="Stem of the output file names.")] = "beside",
) -> None:
    """Compare a checkpoint on this CPU with transformers and ctranslate2.

    Our engine alone and behind Triton, transformers' generate, and ctranslate2 where it is installed take
    turns; fp32, greedy, fixed output lengths.

    \b
    Example:
      tridecode bench beside --streams 1,16,64
    """
    from tridecode.tools.bench.beside import run_beside
    from tridecode.tools.bench.measure import Job

    job = Job(batches=_numbers(streams), prompt_tokens=prompt_tokens, output_tokens=output_tokens, repeats=1)
    run_beside(model, job, rounds, patience_s, cache, output, name)


@app.command()
def loading(
    preset: _Preset = "bloom-7b1",
    dtype: _Dtype = None,
    device: _Device = "auto",
    loads: Annotated[int, typer.Option(min=2, help="How often to load, each time in a new process.")] = 3,
    folder: Annotated[
        Optional[Path],
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder for the temporary weights; default: the system's.",
        ),
    ] = None,
    output: _Output = _RESULTS,
) -> None:
    """Measure loading time and memory.

    Writes random weights of the preset's shape and loads them from the page cache, each time in a new
    process. Device memory is read before loading, with the engine, without it, and after the process.

    \b
    Example:
      tridecode bench loading --preset bloom-7b1
    """
    from tridecode.tools.bench.loading import run_loading

    run_loading(preset, dtype, device, loads, folder, output)


@app.command()
def agree(
    model: Annotated[
        Optional[str], typer.Option(help="Hugging Face directory or .gguf; default: SmolLM2-135M.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 64,
    prompts: Annotated[int, typer.Option(help="Number of prompts, at most 16.")] = 16,
    device: _Device = "auto",
    output: _Output = _RESULTS,
) -> None:
    """Compare one checkpoint's greedy tokens between CPU and GPU.

    CPU in fp32 against GPU in fp32, fp16 and bf16 (without a GPU, CPU in bf16), and each prompt alone against
    all in one batch: the share of equal answers, and the logit margins where answers differ.

    \b
    Example:
      tridecode bench agree --model SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from tridecode.tools.bench.agree import run_agree

    run_agree(model, tokens, prompts, device, output)


@app.command()
def load(
    url: Annotated[
        str, typer.Option("--url", "-u", help="host[:port] of the server's gRPC; port 8001.")
    ] = "localhost:8001",
    model: Annotated[
        Optional[str], typer.Option("--model", "-m", help="Default: the streaming text model.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids through fastertransformer_streaming, not text.")
    ] = False,
    concurrency: Annotated[
        str, typer.Option(help="Concurrent requests, separated by commas: one run each.")
    ] = "1",
    request_rate: Annotated[
        Optional[str], typer.Option(help="Poisson arrivals per second, in place of --concurrency.")
    ] = None,
    requests: Annotated[
        Optional[int], typer.Option(help="Requests of each run; default: 4 times the concurrency.")
    ] = None,
    prompt_tokens: _PromptTokens = 512,
    output_tokens: _OutputTokens = 128,
    prompts: _Prompts = None,
    tokenizer: _Tokenizer = None,
    vocab_size: Annotated[int, typer.Option(help="With --tokens: random ids are below it.")] = 1000,
    natural_ends: Annotated[
        bool, typer.Option("--natural-ends", help="Let the model end a text before --output-tokens.")
    ] = False,
    processes: Annotated[
        Optional[int], typer.Option(help="Processes of the load generator; default: one per 16 streams.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 600.0,
    max_seconds: Annotated[
        float, typer.Option(help="All runs together start requests for this many seconds.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    output: _Output = _RESULTS,
) -> None:
    """Measure a running server under load.

    Time to the first token, time between tokens, tokens and requests per second, over gRPC streams. Exit
    code 1 if requests failed.

    \b
    Example:
      tridecode bench load --tokenizer models --concurrency 1,16,64
      tridecode bench load --prompts lambada_test.jsonl --requests 512 --concurrency 16
    """
    from tridecode.tools.bench.load.command import LoadPlan, run_load_plan

    plan = LoadPlan(
        url=url,
        model=model,
        tokens_in=tokens,
        concurrencies=_numbers(concurrency),
        request_rates=_rates(request_rate),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompts=prompts,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        forced_length=not natural_ends,
        processes=processes,
        timeout_s=timeout_s,
        max_seconds=max_seconds,
        seed=seed,
    )
    if run_load_plan(plan, output):
        raise typer.Exit(1)


def _job(
    preset: str,
    directory: Optional[Path],
    dtype: Optional[str],
    device: str,
    batches: Optional[str],
    sizes: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: Optional[int],
    repeats: int,
    tp: int,
    prompts: Optional[Path] = None,
    tokenizer: Optional[Path] = None,
    workload: Optional[str] = None,
    requests: Optional[int] = None,
    quantization: Optional[str] = None,
) -> "Job":
    from tridecode.tools.bench import jobs
    from tridecode.tools.bench.load.workloads import LAMBADA_OUTPUT

    if prompts is not None and workload is not None:
        raise ConfigError("--prompts and --workload are two sources of prompts; wanted one of them")
    if batches is not None:
        sizes = _numbers(batches)
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


def _numbers(text: str) -> tuple[int, ...]:
    return _list_of(int, text, "whole numbers of 1 or more, e.g. 1,8,64", 1)


def _rates(text: Optional[str]) -> tuple[float, ...]:
    return () if text is None else _list_of(float, text, "requests per second, e.g. 0.5,2,8", 1e-9)


def _list_of(kind: Callable[[str], _Number], text: str, wanted: str, least: float) -> tuple[_Number, ...]:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not min(values) >= least:
        raise ConfigError(f"{text!r} is not a list of {wanted}")
    return values
