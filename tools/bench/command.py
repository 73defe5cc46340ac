"""The commands of `tridecode bench`: tables on the terminal, JSON files and plots in a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tridecode.tools.bench.front.command import batches, front
from tridecode.tools.bench.options import (
    RESULTS,
    Batches,
    CacheDtype,
    Device,
    DoorPython,
    Dtype,
    Int8Head,
    Int8HeadInputs,
    Model,
    Output,
    OutputTokens,
    Pp,
    Preset,
    Prompts,
    PromptTokens,
    Quantization,
    Repeats,
    Requests,
    Tokenizer,
    Tp,
    Workload,
    WorkloadOutput,
    job_of,
    numbers,
    rates,
)
from tridecode.tools.bench.prefix.command import prefix
from tridecode.tools.bench.speculate.command import speculate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure the engine, a server, or other engines.",
    epilog="Start with:  tridecode bench engine --preset toy",
)


@app.command()
def engine(
    preset: Preset = "smollm2-135m",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batches: Batches = None,
    prompt_tokens: PromptTokens = 512,
    output_tokens: WorkloadOutput = None,
    repeats: Repeats = 3,
    tp: Tp = 1,
    pp: Pp = 1,
    kv_cache_dtype: CacheDtype = "auto",
    prompts: Prompts = None,
    tokenizer: Tokenizer = None,
    workload: Workload = None,
    requests: Requests = None,
    quantization: Quantization = None,
    int8_head: Int8Head = False,
    int8_head_inputs: Int8HeadInputs = False,
    output: Output = RESULTS,
) -> None:
    """Measure the engine without a server.

    Time to the first token, milliseconds per step, tokens per second; greedy, fixed output lengths.

    \b
    Example:
      tridecode bench engine --preset bloom-7b1 --batches 1,8,64,256
    """
    from tridecode.tools.bench import compare

    job = job_of(
        preset, model, dtype, device, batches, (1, 8, 64, 256), prompt_tokens, output_tokens, repeats, tp,
        prompts, tokenizer or model, workload, requests, quantization,
    )  # fmt: skip
    job = replace(job, kv_cache_dtype=kv_cache_dtype, int8_head=int8_head, pipeline_para_size=pp)
    job = replace(job, int8_head_inputs=int8_head_inputs)
    compare.run_engine(job, output)


@app.command()
def server(
    preset: Preset = "smollm2-135m",
    repository: Annotated[Path | None, typer.Option(help="A model repository instead of the preset.")] = None,
    dtype: Dtype = None,
    device: Device = "auto",
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,64,256",
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    repeats: Repeats = 3,
    tp: Tp = 1,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids through fastertransformer_streaming, not text.")
    ] = False,
    door_python: DoorPython = None,
    output: Output = RESULTS,
) -> None:
    """Measure the overhead of the server compared with the engine alone.

    Both run on this machine, one after the other; requests go over gRPC streams.

    \b
    Example:
      tridecode bench server --preset bloom-7b1 --streams 1,64,256
    """
    from tridecode.tools.bench import compare

    job = job_of(preset, repository, dtype, device, streams, (), prompt_tokens, output_tokens, repeats, tp)
    compare.run_server(job, output, tokens_in=tokens, door_python=door_python)


@app.command("compare")
def compare_engines(
    preset: Preset = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = "auto",
    batches: Batches = None,
    prompt_tokens: PromptTokens = 512,
    output_tokens: WorkloadOutput = None,
    repeats: Repeats = 3,
    prompts: Prompts = None,
    tokenizer: Tokenizer = None,
    workload: Workload = None,
    requests: Requests = None,
    output: Output = RESULTS,
) -> None:
    """Compare our engine with transformers and vLLM on the same prompts.

    Each engine runs in its own process; vLLM only if it is installed.

    \b
    Example:
      tridecode bench compare --preset llama-3-8b --batches 1,8,64
      tridecode bench compare --preset bloom-7b1 --workload lambada
    """
    from tridecode.tools.bench import compare

    job = job_of(
        preset, None, dtype, device, batches, (1, 8, 64), prompt_tokens, output_tokens, repeats, 1,
        prompts, tokenizer, workload, requests,
    )  # fmt: skip
    compare.run_compare(job, output)


@app.command()
def mix(
    preset: Preset = "smollm2-135m",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the load.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent sequences.")] = 256,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Poisson arrivals per second; 0: all requests at once.")
    ] = 0.0,
    repeats: Repeats = 3,
    tp: Tp = 1,
    kv_cache_dtype: CacheDtype = "auto",
    quantization: Quantization = None,
    int8_head: Int8Head = False,
    output: Output = RESULTS,
) -> None:
    """Measure a load of chats: prompts and answers of many lengths.

    Prompts of about 180 tokens (16 to 1,024), answers of about 150 (4 to 512), of log-normal lengths. Our
    engine, step by step, and vLLM if it is installed.

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
        str | None, typer.Option(help="Hugging Face directory or .gguf; default: SmolLM2-135M.")
    ] = None,
    streams: Annotated[str, typer.Option(help="Concurrent streams, separated by commas.")] = "1,16,64",
    prompt_tokens: PromptTokens = 64,
    output_tokens: OutputTokens = 64,
    rounds: Annotated[
        int, typer.Option(min=1, help="Each engine runs once per round; medians are reported.")
    ] = 5,
    patience_s: Annotated[float, typer.Option(help="Repeat disturbed runs for this many seconds.")] = 0.0,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the converted repository.")] = Path("demo"),
    output: Output = RESULTS,
    name: Annotated[str, typer.Option(help="Stem of the output file names.")] = "beside",
) -> None:
    """Compare a checkpoint on this CPU with transformers and ctranslate2.

    Our engine alone and behind Triton, transformers' generate, and, if installed, ctranslate2 take
    turns; fp32, greedy, fixed output lengths.

    \b
    Example:
      tridecode bench beside --streams 1,16,64
    """
    from tridecode.tools.bench.beside import run_beside
    from tridecode.tools.bench.measure import Job

    job = Job(batches=numbers(streams), prompt_tokens=prompt_tokens, output_tokens=output_tokens, repeats=1)
    run_beside(model, job, rounds, patience_s, cache, output, name)


@app.command()
def loading(
    preset: Preset = "bloom-7b1",
    dtype: Dtype = None,
    device: Device = "auto",
    loads: Annotated[int, typer.Option(min=2, help="Number of loads, each in a new process.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder for the temporary weights; default: the system's.",
        ),
    ] = None,
    output: Output = RESULTS,
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
        str | None, typer.Option(help="Hugging Face directory or .gguf; default: SmolLM2-135M.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 64,
    prompts: Annotated[int, typer.Option(help="Number of prompts, at most 16.")] = 16,
    device: Device = "auto",
    output: Output = RESULTS,
) -> None:
    """Compare one checkpoint's greedy tokens between CPU and GPU. CPU in fp32 is compared with GPU in fp32,
    fp16 and bf16 (without a GPU, with CPU in bf16), and each prompt alone with all in one batch: the share of
    equal answers, and the logit margins where answers differ.

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
        str | None, typer.Option("--model", "-m", help="Default: the streaming text model.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids through fastertransformer_streaming, not text.")
    ] = False,
    concurrency: Annotated[
        str, typer.Option(help="Concurrent requests, separated by commas: one run each.")
    ] = "1",
    request_rate: Annotated[
        str | None, typer.Option(help="Poisson arrivals per second, instead of --concurrency.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each run; default: 4 times the concurrency.")
    ] = None,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    prompts: Prompts = None,
    tokenizer: Tokenizer = None,
    vocab_size: Annotated[int, typer.Option(help="With --tokens: random ids are below it.")] = 1000,
    natural_ends: Annotated[
        bool, typer.Option("--natural-ends", help="Let the model end a text before --output-tokens.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the load generator; default: one per 16 streams.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 600.0,
    max_seconds: Annotated[
        float, typer.Option(help="Total time in seconds during which all runs start requests.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    output: Output = RESULTS,
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
        concurrencies=numbers(concurrency),
        request_rates=rates(request_rate),
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


app.command()(front)
app.command()(batches)
app.command()(prefix)
app.command()(speculate)
