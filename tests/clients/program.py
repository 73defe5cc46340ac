"""One way to use one public program: a row of docs/guides/clients.md.

Words in braces are filled in by run.py: {python} and {bin} of the program's environment, {http}, {grpc} and
{openai} of the server (the last one a URL that ends in /v1), {tools} (that of a second OpenAI service, whose
template has tools), {front} (the first without /v1), {tokenizer} and {work} (folders), {data} and {scripts}
(of this folder), {requests} (shipped request files), {perf_analyzer}, {source} (the program's file), {folder}
(of the environment), {model}, {prompt} and {tokens}.
"""

from __future__ import annotations

from dataclasses import dataclass

VLLM, LLMAPI = "vllm_model", "tensorrt_llm"
BLS, PLAIN, UNBATCHED = "tensorrt_llm_bls", "tensorrt_llm_bls_plain", "tensorrt_llm_bls_unbatched"
FT, FT_STREAM = "fastertransformer", "fastertransformer_streaming"


@dataclass(frozen=True)
class Program:
    """One way to use one public program.

    environment: a key of ENVIRONMENTS; empty: the machine's. route: of the OpenAI service, for its clients;
    {model} is the served name. answers: the program prints the line ANSWER and its text, which must be the
    server's answer, on a chat route the answer to the chat. shows: a regular expression that must match the
    output; never: one that must not. options: of build-repo, if the default repository does not
    suffice. source: a file of a source checkout (--sources); without it, the test sends `recorded` instead:
    requests, pairs of client and model. why: the reason for an expected failure; empty: it should pass.
    flag: an option that the program's own documentation lacks.
    """

    name: str
    use: str
    command: tuple[str, ...] = ()
    environment: str = ""
    model: str = BLS
    route: str = ""
    answers: bool = False
    shows: str = ""
    never: str = ""
    options: tuple[str, ...] = ()
    source: str = ""
    recorded: tuple[tuple[str, str], ...] = ()
    why: str = ""
    flag: str = ""
    limit_s: float = 90.0

    @property
    def is_chat(self) -> bool:
        return "chat" in self.route

    def uses(self, word: str) -> bool:
        """Return whether the command has a word in braces, given without them."""
        return any(f"{{{word}}}" in part for part in self.command)


def calls(name: str, script: str, environment: str, ways: dict[str, str], **common: object) -> list[Program]:
    """Programs of one script of ours that calls a library: way -> model."""
    command = ("{python}", "{scripts}/" + script, "{http}", "{grpc}", "{model}", "{prompt}", "{tokens}")
    return [
        Program(name, f"`{way}`", (*command, way), environment, model, answers=True, **common)
        for way, model in ways.items()
    ]
