"""The options of `tridecode generate` that come from the table of sampling parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from tridecode.backend.wire.sampling_params import Parameter, SamplingParams, parameters

#: meaning of an option to this program, in addition to the parameter's meaning to the server
_NOTES = {
    "temperature": "given alone, it sets --top-p 1",
    "beam_width": "the best one is printed",
    "seed": "default: drawn, and shown on stderr",
}
#: it prints one answer, and the text models do not declare the others
_WITHOUT = ("num_return_sequences", "early_stopping", "beam_search_diversity_rate")


def with_sampling_options(
    command: Callable[..., None], table: type[SamplingParams] = SamplingParams
) -> Callable[..., None]:
    """Return the command with its last argument replaced by an option for each sampling parameter with a
    range.

    That argument, `sampling`, is {parameter: value, or None where the option is not given}. A parameter that
    the command takes itself gets no second option.
    """
    hints = get_type_hints(command, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[:-1]
    rows = [row for row in parameters(table) if row.range and row.name not in (*hints, *_WITHOUT)]
    options = [
        inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(row))
        for row in rows
    ]

    @functools.wraps(command)
    def called(**arguments: Any) -> None:
        sampling = {row.name: arguments.pop(row.name) for row in rows}
        command(**arguments, sampling=sampling)

    evaluated = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    called.__signature__ = inspect.Signature(evaluated + options)  # type: ignore[attr-defined]
    return called


def _option(row: Parameter) -> Any:
    text = "; ".join(filter(None, (row.meaning, _NOTES.get(row.name)))).replace("`", "")
    return Annotated[row.type | None, typer.Option(help=f"{text[0].upper()}{text[1:]}.")]
