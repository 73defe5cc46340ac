"""Removes the leading axis of size 1 that every tensor of the interactive contract has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs


def without_axis(inputs: Inputs) -> Inputs:
    """Remove the axis from the inputs, in place. Raises RequestError for another size."""
    for name, array in inputs.arrays.items():
        if array.ndim == 0 or array.shape[0] != 1:
            found = f"{inputs.sent_as(name)} has shape {list(array.shape)}"
            raise RequestError(f"{found}; wanted a first axis of 1, then the rows")
        inputs.arrays[name] = array.reshape(array.shape[1:])  # array[0] may be a scalar
    return inputs


def with_axis(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array)[None] for name, array in arrays.items()}
