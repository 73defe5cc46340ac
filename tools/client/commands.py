"""The commands `tridecode generate`, `tridecode send-request` and `tridecode demo`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.client.sampling_options import with_sampling_options


@with_sampling_options
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; - reads stdin.")],
    url: Annotated[
        str, typer.Option("--url", "-u", help="host[:port] of the server's gRPC; port 8001.")
    ] = "localhost:8001",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Default: tensorrt_llm_bls or ensemble, whichever is served."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the checkpoint's chat template, as a user.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="With --chat: repository or tokenizer folder; default: the one served here."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="With --chat and --tools: file with a template that replaces the checkpoint's."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with a list of tools, as OpenAI's API has them; with --chat's template."
        ),
    ] = None,
    tool_choice: Annotated[
        str, typer.Option(help="With --tools: auto, required, or the function that is to be called.")
    ] = "auto",
    schema: Annotated[Path | None, typer.Option(help="JSON schema that the answer follows.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Grammar that the answer follows, in Lark's notation or EBNF.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that matches the whole answer.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Text that the answer may be; repeatable.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.")
    ] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    bad: Annotated[list[str] | None, typer.Option(help="Word that is never generated; repeatable.")] = None,
    lora_name: Annotated[
        str | None, typer.Option(help="LoRA adapter of the server; see `tridecode adapters`.")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it is generated.")] = True,
    timeout_s: Annotated[
        float | None, typer.Option(help="Give up after this many seconds without a response.")
    ] = None,
    *,
    sampling: dict[str, Any],
) -> None:
    """Generate the continuation of a prompt.

    Decoding is greedy unless --temperature, --top-k or --top-p is given. The text goes to stdout; the seed,
    the time to the first token and the tokens per second go to stderr. Ctrl-C cancels the request.

    \b
    Example:
      tridecode generate --prompt "The capital of France is" --temperature 0.7 --top-k 50
      tridecode generate --prompt "What is gravity?" --chat
      tridecode generate --prompt "Is it warm? " --choice yes --choice no
      tridecode generate --prompt "How deep is the harbour?" --tools tools.json --tool-choice required
    """
    from tridecode.tools.client import forms
    from tridecode.tools.client import generate as client

    one_of = [_utf8("--choice", text) for text in choice or ()]
    guide = forms.read_guide(schema, grammar, None if regex is None else _utf8("--regex", regex), one_of)
    given = {
        **sampling,
        "max_tokens": max_tokens,
        "stop_words": [_utf8("--stop", word) for word in stop or ()] or None,
        "bad_words": [_utf8("--bad", word) for word in bad or ()] or None,
        "lora_name": None if lora_name is None else _utf8("--lora-name", lora_name),
        **guide,
    }
    text: str | client.TemplatedPrompt
    text = asked = _read_stdin() if prompt == "-" else _utf8("--prompt", prompt)
    url = client.grpc_address(url)
    called: forms.ToolChat | None = None
    if tools is not None:
        if guide:
            raise ConfigError("--tools and a form of the answer are both given; wanted one of them")
        from tridecode.tools.client.chat import find_tokenizer_dir

        called = forms.tool_chat(find_tokenizer_dir(tokenizer, url), asked, tools, tool_choice, chat_template)
        text = called.prompt
        given.update(called.inputs, stop_words=[*called.stop, *(given["stop_words"] or ())] or None)
    elif chat:
        from tridecode.tools.client.chat import chat_prompt, find_tokenizer_dir

        text = chat_prompt(find_tokenizer_dir(tokenizer, url), asked, template_file=chat_template)
    elif tokenizer is not None or chat_template is not None:
        option = "--chat-template" if tokenizer is None else "--tokenizer"
        raise ConfigError(f"{option} is for --chat and --tools: without them the prompt is sent unchanged")
    sampling = client.complete_sampling(given)
    if given["seed"] is None and sampling["seed"] is not None:
        typer.secho(f"seed {sampling['seed']}", dim=True, err=True)
    if not stream:
        pieces = iter([client.infer_text(url, model, text, timeout_s=timeout_s, **sampling)])
        typer.echo("".join(piece.text for piece in (called.shown(pieces) if called else pieces)))
        return
    pieces = client.stream_text(url, model, text, timeout_s=timeout_s, **sampling)
    if not client.print_stream(called.shown(pieces) if called else pieces):
        raise typer.Exit(130)


def send_request(
    file: Annotated[Path | None, typer.Argument(help="A JSON request file.")] = None,
    params: Annotated[str | None, typer.Option(help="JSON that overrides fields of the file.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Give up after this many seconds without a response.")
    ] = None,
) -> None:
    """Send a JSON request file of FasterTransformer's client.

    Prints every tensor of the response, or one line per response of a stream.

    \b
    Example:
      tridecode send-request sample_request.json --params '{"config": {"url": "localhost:9000"}}'
    """
    from rich.console import Console

    from tridecode.tools.client import send_request as sender

    request = sender.read_request(file, None if params is None else _utf8("--params", params))
    show = sender.show_streamed if request.stream_api else sender.show
    console = Console()
    for answer in sender.send_request(request, timeout_s):
        show(answer, console)


def demo(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face directory, hub id or .gguf; default: SmolLM2-135M.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The question to answer.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.")
    ] = 128,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the converted repository.")] = Path("demo"),
) -> None:
    """Convert a small model, serve it and answer one prompt.

    \b
    Example:
      tridecode demo --prompt "Explain gravity to a child."
    """
    question = None if prompt is None else _utf8("--prompt", prompt)
    if model is not None:
        from tridecode.converters.model_source import find_model, is_hub_id

        if not is_hub_id(model):
            find_model(model)  # refuses a path that does not exist

    from tridecode.tools import demo as show  # imports torch

    raise typer.Exit(show.run_demo(model, question, max_tokens=max_tokens, cache=cache))


def _read_stdin() -> str:
    """Return all of stdin, without the newline that `echo` adds."""
    return _decode("stdin", sys.stdin.buffer.read()).removesuffix("\n")


def _utf8(name: str, text: str) -> str:
    """Return an argument as it was typed; bytes that are not UTF-8 arrived as surrogates."""
    return _decode(name, os.fsencode(text))


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ConfigError(f"{name} is not UTF-8: {found}; wanted UTF-8 text") from None
