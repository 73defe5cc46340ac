"""The command `tridecode chat`."""

from pathlib import Path
from typing import Annotated

import typer


def chat(
    where: Annotated[
        str,
        typer.Argument(
            metavar="[URL|CHECKPOINT]",
            help="An OpenAI service, or a checkpoint or repository to run here.",
        ),
    ] = "http://localhost:9000",
    system: Annotated[str, typer.Option("--system", "-s", help="System message.")] = "",
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="E.g. temperature=0."),
    ] = None,
    load: Annotated[Path | None, typer.Option(help="Continue this saved conversation.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder of repositories. Default: $TRIDECODE_CACHE, or ~/.cache/tridecode."),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key of the service.")] = "",
) -> None:
    """Chat with a model in the terminal.

    A model without a chat template continues your text. Ctrl-C stops an answer, Ctrl-D leaves; /help
    shows the commands.

    \b
    Example:
      tridecode chat http://localhost:9000 --system "Answer in one sentence." --set temperature=0.7
    """
    from tridecode.tools.chat.conversation import Conversation
    from tridecode.tools.chat.sources import open_source
    from tridecode.tools.chat.terminal import Chat, line_reader

    conversation = Conversation(chats=True, system=system)
    conversation.set_values(params or [])
    source = open_source(where, cache, api_key)
    try:
        conversation.chats = source.chats
        if load is not None:
            conversation.load(load)
        Chat(source, conversation, line_reader()).run()
    finally:
        source.close()
