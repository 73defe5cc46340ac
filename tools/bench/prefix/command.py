"""The command `tridecode bench prefix`."""

from typing import Annotated

import typer

from tridecode.tools.bench.options import (
    RESULTS,
    CacheDtype,
    Device,
    Dtype,
    Int8Head,
    Model,
    Output,
    Preset,
    Quantization,
    Tp,
)


def prefix(
    preset: Preset = "smollm2-135m",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = "auto",
    load: Annotated[
        str,
        typer.Option(
            help="conversations; documents: conversations with different beginnings; prefixes: groups of 16 "
            "with a common beginning; long: one repeated prompt; swap: four prompts in turn; streams: swap "
            "while conversations decode; mix: chats without hits."
        ),
    ] = "conversations",
    conversations: Annotated[int, typer.Option(min=1, help="Conversations at the same time.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each conversation.")] = 8,
    common: Annotated[
        int, typer.Option(help="Tokens of the common beginning; in `long`, `swap`, `streams`: of the prompt.")
    ] = 2000,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            help="Alternating runs with and without the cache, or with and without the host tier.",
        ),
    ] = 5,
    slots: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent sequences.")] = 64,
    cache_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of the KV cache; default: as in config.pbtxt.")
    ] = None,
    host_cache_bytes: Annotated[int, typer.Option(min=0, help="Bytes of the host tier; 0: none.")] = 0,
    tp: Tp = 1,
    kv_cache_dtype: CacheDtype = "auto",
    quantization: Quantization = None,
    int8_head: Int8Head = False,
    seed: Annotated[int, typer.Option(help="Seed of the load.")] = 0,
    url: Annotated[
        str, typer.Option(help="host:port of a running server's gRPC, instead of an engine here.")
    ] = "",
    metrics: Annotated[str, typer.Option(help="With --url: host:port of the server's metrics.")] = "",
    vocab_size: Annotated[int, typer.Option(help="With --url: random ids are below it.")] = 1000,
    output: Output = RESULTS,
) -> None:
    """Measure the reuse of common prefixes.

    Computed and least possible prompt tokens, tokens per second and times to the first token, with hits and
    without, in turns with the same load without the cache. Also the index alone.

    \b
    Example:
      tridecode bench prefix --preset toy --conversations 8 --rounds 3 --common 100
    """
    from tridecode.tools.bench.prefix.job import prefix_job
    from tridecode.tools.bench.prefix.run import PrefixPlan, check_plan, run_prefix

    plan = PrefixPlan(load, conversations, rounds, common, repeats, seed, url, metrics, vocab_size)
    check_plan(plan)
    job = prefix_job(
        plan, preset, model, dtype, device=device, batches=(slots,), tensor_para_size=tp,
        kv_cache_dtype=kv_cache_dtype, quantization=quantization or "", int8_head=int8_head,
        cache_bytes=cache_bytes, host_cache_bytes=host_cache_bytes,
    )  # fmt: skip
    run_prefix(plan, job, output)
