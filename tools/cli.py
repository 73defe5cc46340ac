"""`tridecode`: every command of the project. What is heavy is imported by the command that needs it."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from tridecode.backend.engine import spin_briefly
from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.tools.bench.cli import app as bench_app


class _Group(TyperGroup):
    """Our errors are one line and exit code 1; anything else is a fault of ours and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TridecodeError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut long options off on a narrow terminal
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve GPT-family language models behind NVIDIA Triton Inference Server.",
    epilog="Start with:  tridecode demo",
)
app.add_typer(bench_app, name="bench")

_Url = Annotated[str, typer.Option("--url", "-u", help="host:port of the server's gRPC.")]


@app.command("build-repo")
def build_repo(
    model: Annotated[str, typer.Option(help="Hugging Face directory, hub id, or .gguf file.")],
    output: Annotated[Path, typer.Option(help="The model repository to write.")],
    tp: Annotated[int, typer.Option(min=1, help="tensor_para_size: GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline_para_size: stages of layers.")] = 1,
    dtype: Annotated[
        Optional[str],
        typer.Option(help="fp32, fp16 or bf16; default: the checkpoint's with a GPU, fp32 without."),
    ] = None,
    ensemble_owner: Annotated[
        str, typer.Option(help="Whose tensors the model `ensemble` has: fastertransformer or tensorrt_llm.")
    ] = "fastertransformer",
    decoupled_fastertransformer: Annotated[
        bool, typer.Option("--decoupled-fastertransformer", help="`fastertransformer` itself streams.")
    ] = False,
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="The text model gives one response; _streaming streams.")
    ] = False,
    unbatched_text: Annotated[
        bool,
        typer.Option("--unbatched-text", help="One more text model, _unbatched, for shapes [1], not [1, 1]."),
    ] = False,
    setting: Annotated[
        Optional[list[str]],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the engine, e.g. max_sequences=128."),
    ] = None,
    model_name: Annotated[Optional[str], typer.Option(help="model_name in config.ini.")] = None,
    tokenizer: Annotated[Optional[Path], typer.Option(help="Take the tokenizer from this folder.")] = None,
    parity: Annotated[
        bool, typer.Option(help="Prove the result against transformers, into PARITY.json.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a repository at --output.")] = False,
) -> None:
    """Convert a checkpoint into a Triton model repository.

    The result is compared with transformers before it is there; PARITY.json keeps what came of it.

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
        model_name=model_name,
        tokenizer=tokenizer,
        parity=parity,
        overwrite=overwrite,
        engine_settings=_settings(setting or []),
    )


def _settings(texts: list[str]) -> dict[str, str]:
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text}: wanted KEY=VALUE, as --set max_sequences=128")
        settings[key.strip()] = value.strip()
    return settings


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    triton_args: Annotated[
        Optional[list[str]], typer.Argument(metavar="-- [FLAGS]", help="Flags for tritonserver, after --.")
    ] = None,
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = 8002,
    address: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: on every interface (read docs/security.md first).")
    ] = "127.0.0.1",
    metrics_address: Annotated[
        Optional[str], typer.Option(help="Where /metrics listens, if elsewhere than --address.")
    ] = None,
    door_python: Annotated[
        Optional[str], typer.Option(help="Python of the models' processes; it needs numpy < 2.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds for requests under way after SIGTERM.")] = 20.0,
    start_timeout_s: Annotated[
        float, typer.Option(help="Seconds that a start may go without progress.")
    ] = 600.0,
    orphans: Annotated[
        str,
        typer.Option(
            metavar="idle|leave|SECONDS",
            help="When to restart tritonserver for requests whose model died: idle (nothing else is open), "
            "after SECONDS, or never.",
        ),
    ] = "idle",
) -> None:
    """Run tritonserver on a model repository.

    Models whose process dies are loaded again, and so is a tritonserver that dies; SIGTERM lets requests
    under way finish. Wrong settings end it with exit code 2, every other failure with 1.

    \b
    Example:
      tridecode serve models --grpc-port 9001 -- --log-verbose=1
    """
    from tridecode.tools.serve import serve as run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        code = run(
            repository,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            door_python=door_python,
            triton_args=triton_args or [],
            address=address,
            drain_s=drain_s,
            metrics_address=metrics_address,
            start_timeout_s=start_timeout_s,
            orphans=orphans,
        )
    except ConfigError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@app.command(
    "tritonserver",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def tritonserver(context: typer.Context) -> None:
    """Run the tritonserver of this installation with NVIDIA's own flags.

    It listens on the loopback interface and closes the APIs of model control, shared memory, logging and
    tracing, where the flags do not say otherwise. `tridecode serve` also brings back what dies.

    \b
    Example:
      tridecode tritonserver --model-repository models --http-port 8000
    """
    from tridecode.tools.tritonserver import main as run

    raise typer.Exit(run(context.args))


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from; - reads stdin.")],
    url: _Url = "localhost:8001",
    model: Annotated[
        Optional[str],
        typer.Option("--model", "-m", help="Default: tensorrt_llm_bls, else ensemble, as the server has."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 128,
    min_tokens: Annotated[Optional[int], typer.Option(help="No end before so many new tokens.")] = None,
    temperature: Annotated[Optional[float], typer.Option(help="0: the likeliest token.")] = None,
    top_k: Annotated[Optional[int], typer.Option(help="Choose among so many; 0: all.")] = None,
    top_p: Annotated[Optional[float], typer.Option(help="Choose among so much probability.")] = None,
    repetition_penalty: Annotated[Optional[float], typer.Option(help="Over 1: fewer repetitions.")] = None,
    presence_penalty: Annotated[Optional[float], typer.Option(help="Off tokens that occurred.")] = None,
    frequency_penalty: Annotated[Optional[float], typer.Option(help="Off tokens, an occurrence.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        Optional[list[str]], typer.Option(help="A text that ends the answer; repeatable.")
    ] = None,
    bad: Annotated[Optional[list[str]], typer.Option(help="A word never to write; repeatable.")] = None,
    stream: Annotated[bool, typer.Option(help="Show the text as it is written.")] = True,
    timeout_s: Annotated[Optional[float], typer.Option(help="The longest silence, in seconds.")] = None,
) -> None:
    """Stream the continuation of a prompt to the terminal.

    The text goes to stdout; first-token time and tokens a second go to stderr. Ctrl-C cancels.

    \b
    Example:
      tridecode generate --prompt "The capital of France is" --temperature 0.7 --top-k 50
    """
    from tridecode.tools.generate import infer_text, print_stream, stream_text

    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop_words": stop,
        "bad_words": bad,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    if not stream:
        print(infer_text(url, model, text, **sampling).text)
        return
    if not print_stream(stream_text(url, model, text, timeout_s=timeout_s, **sampling)):
        raise typer.Exit(130)


@app.command("send-request")
def send_request(
    file: Annotated[Optional[Path], typer.Argument(help="A JSON request file.")] = None,
    params: Annotated[Optional[str], typer.Option(help="JSON that is merged over the file.")] = None,
    timeout_s: Annotated[Optional[float], typer.Option(help="The longest silence, in seconds.")] = None,
) -> None:
    """Send one of FasterTransformer's JSON request files.

    Every tensor of the answer is printed; of a stream, a line a response.

    \b
    Example:
      tridecode send-request sample_request.json --params '{"config": {"url": "localhost:9000"}}'
    """
    from rich.console import Console

    from tridecode.tools import send_request as sender

    request = sender.read_request(file, params)
    show = sender.show_streamed if request.stream_api else sender.show
    console = Console()
    for answer in sender.send_request(request, timeout_s):
        show(answer, console)


@app.command()
def check(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Also read every weight file and compare it.")
    ] = False,
) -> None:
    """Find what is wrong with a model repository.

    Exit code 1 where there are errors; warnings leave it 0. Nothing is started.

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


@app.command()
def demo(
    model: Annotated[
        Optional[str], typer.Option(help="Hugging Face directory, hub id or .gguf; default: SmolLM2-135M.")
    ] = None,
    prompt: Annotated[Optional[str], typer.Option("--prompt", "-p", help="What to ask.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 128,
    cache: Annotated[Path, typer.Option(help="Where the repository is kept.")] = Path("demo"),
) -> None:
    """Convert, serve and ask a small model, in one go.

    \b
    Example:
      tridecode demo --prompt "Explain gravity to a child."
    """
    from tridecode.tools import demo as show

    raise typer.Exit(show.run_demo(model, prompt, max_tokens=max_tokens, cache=cache))


def main() -> None:
    """The console script."""
    spin_briefly()
    app()


if __name__ == "__main__":
    main()
