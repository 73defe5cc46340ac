"""`tridecode`: every command of the project. Heavy modules are imported by the command that needs them.

Exit codes: 0 success; 1 a command that ran and found faults (`check`, `bench load`), or a defect of ours,
with its traceback; 2 a mistake in the call or its surroundings, one line on stderr; 130 Ctrl-C; 141 the
reader of stdout has left.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from typer.core import TyperGroup

from tridecode.backend.engine import spin_briefly
from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.tools.bench.cli import app as bench_app
from tridecode.tools.serve.command import serve, tritonserver

#: errors of the operating system that the person at the terminal can mend; any other is a defect of ours
_MENDABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE),
}


class _Group(TyperGroup):
    """Expected mistakes are one line and exit code 2; anything else is a defect and keeps its traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)  # prints --help
        except BrokenPipeError:
            _end_without_stdout()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TridecodeError as error:
            _fail(str(error))
        except BrokenPipeError:
            _end_without_stdout()
        except OSError as error:
            if error.errno not in _MENDABLE:
                raise
            _fail(f"{error.filename or 'writing failed'}: {error.strerror}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _fail(text: str) -> NoReturn:
    """Print `error: <text>` and exit with 2. Of several lines, the first is the cause and comes last."""
    cause, *details = text.strip().splitlines() or ["unknown"]
    for line in details:
        typer.echo(line, err=True)
    typer.secho(f"error: {cause}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2) from None


def _end_without_stdout() -> NoReturn:
    """End as a program killed by SIGPIPE does: the reader of stdout has left, and nobody wants a message."""
    with open(os.devnull, "w") as sink:
        try:
            os.dup2(sink.fileno(), sys.stdout.fileno())  # or the interpreter's own flush would fail at exit
        except (OSError, ValueError):  # stdout is no file, or is closed
            pass
    raise typer.Exit(141) from None


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

_Url = Annotated[str, typer.Option("--url", "-u", help="host[:port] of the server's gRPC; port 8001.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tridecode {version('tridecode')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of `tridecode` itself."""


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
    parity: Annotated[
        bool, typer.Option(help="Compare the result with transformers and write PARITY.json.")
    ] = True,
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
        parity=parity,
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


app.command()(serve)
app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)(tritonserver)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; - reads stdin.")],
    url: _Url = "localhost:8001",
    model: Annotated[
        Optional[str],
        typer.Option("--model", "-m", help="Default: tensorrt_llm_bls or ensemble, whichever is served."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the checkpoint's chat template, as a user.")
    ] = False,
    tokenizer: Annotated[
        Optional[Path],
        typer.Option(help="With --chat: repository or tokenizer folder; default: the one served here."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 128,
    min_tokens: Annotated[
        Optional[int], typer.Option(help="No end token before this many new tokens.")
    ] = None,
    temperature: Annotated[
        Optional[float], typer.Option(help="Softmax temperature; given alone, it sets --top-p 1.")
    ] = None,
    top_k: Annotated[
        Optional[int], typer.Option(help="Sample from the k most likely tokens; 0: all of them.")
    ] = None,
    top_p: Annotated[Optional[float], typer.Option(help="Nucleus (top-p) probability mass.")] = None,
    repetition_penalty: Annotated[
        Optional[float], typer.Option(help="Above 1: tokens that occurred become less likely.")
    ] = None,
    presence_penalty: Annotated[
        Optional[float], typer.Option(help="Subtracted from the logit of each token that occurred.")
    ] = None,
    frequency_penalty: Annotated[
        Optional[float], typer.Option(help="Subtracted from a token's logit per occurrence.")
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(help="The same seed gives the same text; default: drawn, and shown on stderr."),
    ] = None,
    stop: Annotated[Optional[list[str]], typer.Option(help="Text that ends the answer; repeatable.")] = None,
    bad: Annotated[
        Optional[list[str]], typer.Option(help="Word that is never generated; repeatable.")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it is generated.")] = True,
    timeout_s: Annotated[
        Optional[float], typer.Option(help="Give up after this many seconds without a response.")
    ] = None,
) -> None:
    """Generate the continuation of a prompt.

    Decoding is greedy unless --temperature, --top-k or --top-p is given. The text goes to stdout; the seed,
    the time to the first token and the tokens per second go to stderr. Ctrl-C cancels the request.

    \b
    Example:
      tridecode generate --prompt "The capital of France is" --temperature 0.7 --top-k 50
      tridecode generate --prompt "What is gravity?" --chat
    """
    from tridecode.tools import generate as client

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
        "stop_words": [_utf8("--stop", word) for word in stop or ()] or None,
        "bad_words": [_utf8("--bad", word) for word in bad or ()] or None,
    }
    text = _read_stdin() if prompt == "-" else _utf8("--prompt", prompt)
    url = client.grpc_address(url)
    if chat:
        from tridecode.tools.chat import chat_prompt, find_tokenizer_dir

        text = chat_prompt(find_tokenizer_dir(tokenizer, url), text)
    elif tokenizer is not None:
        raise ConfigError("--tokenizer is for --chat: without it the prompt is sent as it is")
    sampling = client.complete_sampling(sampling)
    if seed is None and sampling["seed"] is not None:
        typer.secho(f"seed {sampling['seed']}", dim=True, err=True)
    if not stream:
        typer.echo(client.infer_text(url, model, text, timeout_s=timeout_s, **sampling).text)
        return
    if not client.print_stream(client.stream_text(url, model, text, timeout_s=timeout_s, **sampling)):
        raise typer.Exit(130)


def _read_stdin() -> str:
    """All of stdin, less the one newline that `echo` adds."""
    return _decode("stdin", sys.stdin.buffer.read()).removesuffix("\n")


def _utf8(name: str, text: str) -> str:
    """An argument as it was typed; its bytes that are not UTF-8 came in as surrogates."""
    return _decode(name, os.fsencode(text))


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ConfigError(f"{name} is not UTF-8: {found}; wanted UTF-8 text") from None


@app.command("send-request")
def send_request(
    file: Annotated[Optional[Path], typer.Argument(help="A JSON request file.")] = None,
    params: Annotated[Optional[str], typer.Option(help="JSON that is merged over the file.")] = None,
    timeout_s: Annotated[
        Optional[float], typer.Option(help="Give up after this many seconds without a response.")
    ] = None,
) -> None:
    """Send a JSON request file of FasterTransformer's client.

    Prints every tensor of the response, or one line per response of a stream.

    \b
    Example:
      tridecode send-request sample_request.json --params '{"config": {"url": "localhost:9000"}}'
    """
    from rich.console import Console

    from tridecode.tools import send_request as sender

    request = sender.read_request(file, None if params is None else _utf8("--params", params))
    show = sender.show_streamed if request.stream_api else sender.show
    console = Console()
    for answer in sender.send_request(request, timeout_s):
        show(answer, console)


@app.command()
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


@app.command()
def demo(
    model: Annotated[
        Optional[str], typer.Option(help="Hugging Face directory, hub id or .gguf; default: SmolLM2-135M.")
    ] = None,
    prompt: Annotated[Optional[str], typer.Option("--prompt", "-p", help="The question to answer.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 128,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the converted repository.")] = Path("demo"),
) -> None:
    """Convert a small model, serve it and answer one prompt.

    \b
    Example:
      tridecode demo --prompt "Explain gravity to a child."
    """
    from tridecode.tools import demo as show

    question = None if prompt is None else _utf8("--prompt", prompt)
    raise typer.Exit(show.run_demo(model, question, max_tokens=max_tokens, cache=cache))


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8
    spin_briefly()
    app()


if __name__ == "__main__":
    main()
