"""The input tensors and parameters of one request, compared with a contract.

A field that this version does not implement is refused by name unless its value has no effect; nothing is
ignored silently.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.doors.contracts.field import Contract, Field

#: request parameters that Triton, its clients and its front ends add on their own
HARMLESS_PARAMETERS = (
    "triton_*",
    "id",  # HTTP's generate endpoint passes the request id as a parameter
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
)
_OTHER_TYPES = {"b": "BOOL", "O": "STRING"}
_LONGEST_NAME = 64  # characters that are compared with the inputs' names: the time is quadratic


class Inputs:
    """A copy of a request's input tensors, checked against a contract; the request can be released.

    Sizes are not checked here: Envelope.check runs first. Raises RequestError or UnsupportedError, naming
    the field, from the constructor and from each reader.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], contract: Contract):
        self.arrays: dict[str, np.ndarray] = {}
        self._sent_as: dict[str, str] = {}  # the client's name of a field, for errors
        self._contract = contract
        for name, array in arrays.items():
            field = contract.by_name.get(name)
            if field is None:
                advice = advice_on(name, contract) or _meant(name, contract)
                raise UnsupportedError(f"this model has no input {_short(name)}{advice}")
            _check_dtype(field, array)
            if field.refused:
                _refuse(field, array)
            else:
                self._take(field, array)
        for field in contract.required:
            if field.name not in self.arrays:
                raise RequestError(f"input {field.name} is missing; this model needs it")

    def _take(self, field: Field, array: np.ndarray) -> None:
        name = field.alias_of or field.name
        if name in self.arrays:
            other = self._sent_as[name]
            if not np.array_equal(self.arrays[name], array):
                raise RequestError(
                    f"{other} and {field.name} are two names of one input and differ; send one"
                )
            return
        self.arrays[name], self._sent_as[name] = np.array(array), field.name

    def sent_as(self, name: str) -> str:
        """Return the client's name of a field that was sent."""
        return self._sent_as.get(name, name)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def rows(self, name: str, batch: int, default: Any = None) -> list:
        """Return one value for each of `batch` rows.

        Accepted shapes: [batch], [batch, 1], or one value for all rows.
        """
        array = self.arrays.get(name)
        if array is None:
            return [default] * batch
        if array.size == 1:
            return [array.reshape(-1)[0].item() if array.dtype != object else array.reshape(-1)[0]] * batch
        if array.size != batch:
            found = f"{self._sent_as[name]} has shape {list(array.shape)}"
            rows = f"a value for each of the {batch} rows of {self._contract.inputs[0].name}"
            raise RequestError(f"{found}; wanted [{batch}, 1], {rows}")
        return array.reshape(-1).tolist()

    def flag(self, name: str, default: bool = False) -> bool:
        """Return one boolean for the whole request; rows that differ are refused."""
        array = self.arrays.get(name)
        if array is None or array.size == 0:
            return default
        if array.any() != array.all():
            raise RequestError(f"{name} differs between the rows of one request; send them apart")
        return bool(array.any())

    def params(self, batch: int) -> list[dict[str, Any]]:
        """Return for each row the sampling parameters that the request sets, by our names."""
        sent = [field for field in self._contract.params if field.name in self.arrays]
        columns = {field.param: self.rows(field.name, batch) for field in sent}
        for field in sent:
            if field.dtype == "STRING":
                column = columns[field.param]
                columns[field.param] = [
                    decode_text(value, field.name, row) for row, value in enumerate(column)
                ]
        return [{param: column[row] for param, column in columns.items()} for row in range(batch)]

    def client_names(self) -> dict[str, str]:
        """Map each sampling parameter to the name under which this client sent it, or would have."""
        return {field.param: self._sent_as.get(field.name, field.name) for field in self._contract.params}


def decode_text(value: Any, name: str, row: int | None = None) -> str:
    """Decode UTF-8 bytes. Raises RequestError that names field, row and byte if they are not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        where = name if row is None else f"{name} of row {row}"
        byte = f"byte {error.start} is 0x{value[error.start]:02x}"
        raise RequestError(f"{where} is not valid UTF-8: {byte}; wanted UTF-8 text") from None


def _check_dtype(field: Field, array: np.ndarray) -> None:
    if array.dtype.type not in field.dtypes:
        raise RequestError(f"{field.name} has the type {_triton_type(array.dtype)}; wanted {field.dtype}")


def _triton_type(dtype: np.dtype) -> str:
    """Return the name of the Triton type, such as FP32, INT64, STRING."""
    kinds = {"f": "FP", "i": "INT", "u": "UINT"}
    return kinds[dtype.kind] + str(8 * dtype.itemsize) if dtype.kind in kinds else _OTHER_TYPES[dtype.kind]


def _refuse(field: Field, array: np.ndarray) -> None:
    if array.size == 0:
        return
    if not field.neutral:
        raise UnsupportedError(f"{field.name} was sent, which this version does not implement; leave it out")
    values = [value for value in array.reshape(-1).tolist() if value not in field.neutral]
    if values:
        # errors are logged, prompts never
        what = "has a text" if field.kind == "prompt" else f"is {_short(values[0])}"
        found = f"{field.name} {what}, which this version does not implement"
        raise UnsupportedError(f"{found}; wanted {_short(field.neutral[0])} or none")


def _short(value: Any) -> str:
    text = repr(value.decode("utf-8", "replace")) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_parameters(values: Mapping[str, Any], contract: Contract, allowed: Iterable[str] = ()) -> None:
    """RequestError unless each parameter of the request is known to be harmless.

    HTTP's generate endpoint turns every field that is not an input into a parameter, so a misspelt field
    arrives here: the error names it and the input that was probably meant. allowed: further patterns to
    accept.
    """
    patterns = (*HARMLESS_PARAMETERS, *contract.parameters, *allowed)
    for name in values:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if name in contract.by_name:
            if contract.by_name[name].refused:  # an input that the model's config.pbtxt does not declare
                _refuse(contract.by_name[name], np.array([values[name]], object))
                continue
            raise RequestError(f"{name} was sent as a request parameter; it is an input tensor of this model")
        known = [*contract.by_name, *(pattern for pattern in patterns if "*" not in pattern)]
        if advice := advice_on(name, contract):
            raise RequestError(f"request parameter {name} is unknown to this model{advice}")
        close = difflib.get_close_matches(name[:_LONGEST_NAME], known, 1, 0.6)
        kind = "the input " if close and close[0] in contract.by_name else ""
        meant = f"; did you mean {kind}{close[0]}?" if close else ""
        raise RequestError(f"request parameter {_short(name)} is unknown to this model{meant}")


def advice_on(name: str, contract: Contract) -> str:
    """Return what to send instead of a field of OpenAI's API; "" for any other name."""
    prompt = contract.inputs[0].name
    if name == "prompt":
        return f"; it takes the prompt as {prompt}"
    if name == "messages":
        rendered = f"it takes one prompt as {prompt}, to which no chat template is applied"
        return (
            f"; {rendered}: render the messages with the model's template first "
            "(docs/guides/clients.md, Chats)"
        )
    return ""


def _nearest(name: str, contract: Contract) -> str:
    return next(iter(difflib.get_close_matches(name[:_LONGEST_NAME], contract.by_name, 1, 0.6)), "")


def _meant(name: str, contract: Contract) -> str:
    """Return advice about an input that config.pbtxt declares but the model does not know."""
    close = _nearest(name, contract)
    return f"; did you mean {close}?" if close else "; leave it out, and remove it from config.pbtxt"
