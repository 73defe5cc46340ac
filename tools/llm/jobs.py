"""Prompts of `LLM`, and the models that answer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tridecode.backend.base.errors import RequestError
from tridecode.tools.llm.outputs import RequestOutput
from tridecode.tools.llm.params import BeamSearchParams, PoolingParams, SamplingParams
from tridecode.tools.llm.prompt_table import PromptTable

#: a text, its token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams | PoolingParams
#: a conversation, for a chat template
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Round:
    """The place of a job in a session.

    session: its number. room: tokens of the whole session. memory_tokens: last tokens that are attended to;
    0: all. history: tokens before the new ones. begins: the engine does not have the session yet.
    """

    session: int
    room: int
    memory_tokens: int
    idle_s: float
    history: list[int]
    begins: bool


@dataclass(frozen=True)
class Job:
    """One prompt with its parameters.

    adapter: name of a LoRA adapter; "": none. add_special_tokens: None: as the repository says. table: a
    prompt table, or the name of a task. round: None outside a session.
    """

    prompt: Prompt
    params: Params
    adapter: str = ""
    add_special_tokens: bool | None = None
    table: PromptTable | str | None = None
    round: Round | None = None


class RunningJob(Protocol):
    """A job while it is answered."""

    output: RequestOutput

    def take(self) -> bool:
        """Add what has come to `output`; return whether that changed it.

        Raises the TridecodeError that the job ended with.
        """
        ...


#: called with a job when there is something to take, on any thread, and not again before the next `take`
Notify = Callable[[Any], None]


class Model(Protocol):
    """Answers jobs. Used by any thread."""

    @property
    def name(self) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def room(self) -> int:
        """Return how many jobs may be open at once."""
        ...

    def begin(self, job: Job, notify: Notify, streaming: bool = False) -> RunningJob:
        """Begin a job, whose end `end` must follow. Raises TridecodeErrors."""
        ...

    def end(self, running: Any) -> None:
        """Note that a job has ended; one that has not is cancelled."""
        ...

    def new_session(self) -> int:
        """Return the number of a session that begins."""
        ...

    def end_session(self, number: int) -> None: ...

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render(self, messages: Messages, **values: Any) -> Prompt:
        """Return the prompt of a chat, whose special tokens the template has written."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PromptParts:
    """A prompt's text and its ids; one of them may be None."""

    text: str | None = None
    ids: list[int] | None = None


def is_one_prompt(prompts: Any) -> bool:
    """Return whether it is one prompt, not a list of some."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and all(type(item) is int for item in prompts)


def params_of_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """Return the parameters of each prompt. Raises RequestError if their number is wrong."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, (SamplingParams, BeamSearchParams, PoolingParams)):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; wanted one, or one for each")
    return list(params)


def tables_of_each(tables: Any, count: int) -> list[PromptTable | str | None]:
    """Return the prompt table of each prompt. Raises RequestError if their number is wrong."""
    if tables is None or isinstance(tables, (PromptTable, str)):
        return [tables] * count
    if len(tables) != count:
        raise RequestError(f"{len(tables)} prompt tables for {count} prompts; wanted one, or one for each")
    return list(tables)


def parts_of(prompt: Prompt) -> PromptParts:
    """Raises RequestError for anything that is not a prompt."""
    if isinstance(prompt, str):
        return PromptParts(prompt)
    if not isinstance(prompt, Mapping):
        return PromptParts(None, _ids(prompt))
    if not prompt or set(prompt) - {"prompt", "prompt_token_ids"}:
        raise RequestError(f"a prompt has the keys {sorted(prompt)}; wanted prompt or prompt_token_ids")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {type(text).__name__}; wanted a text")
    return PromptParts(text, None if ids is None else _ids(ids))


def last_tokens(ids: list[int], params: Params) -> list[int]:
    """Return the ids that truncate_prompt_tokens keeps."""
    keep = params.truncate_prompt_tokens or 0
    return ids[-keep:] if keep > 0 else ids


def _ids(values: Any) -> list[int]:
    ids = list(values)
    wrong = next((value for value in ids if type(value) is not int), None)
    if wrong is not None or not ids:
        raise RequestError(f"a prompt has the token id {wrong!r}; wanted one whole number or more")
    return ids
