"""transformers' models wholly in float64: their norms, softmax and angles ask for float32 by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """While it is entered, what torch is told to compute in float32 is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
        }
        return func(*wide, **named)
