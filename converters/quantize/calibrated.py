"""The result of a calibration: the tensors of a quantised weight directory, and their errors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from tridecode.converters.convert import PlannedConversion
from tridecode.converters.quantize.methods import Method
from tridecode.converters.quantize.store import TensorStore
from tridecode.kernels.formats.quantized import QuantizedWeight


@dataclass
class Calibrated:
    """The tensors of a quantised weight directory.

    changed: by target name, QuantizedWeight for the matrices that method.quantization covers, and other
    tensors with folded scales, float32. errors: of each quantised matrix, those of its products over the
    calibration set (products.ProductErrors), whose token ids are `sequences`. output_errors: of each tuned
    layer, the mean of tune.output_error before and after. divergences: mean divergence from the exact model,
    over some of the texts, before and after the layers were tuned together; None: they were not.
    """

    planned: PlannedConversion
    method: Method
    sequences: list[list[int]]
    changed: TensorStore = field(default_factory=TensorStore)
    errors: dict[str, float] = field(default_factory=dict)
    output_errors: list[tuple[float, float]] = field(default_factory=list)
    divergences: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def conversion(self) -> PlannedConversion:
        """Return the conversion that writes the quantised directory."""
        config = replace(self.planned.config, quantization=self.method.quantization)
        return replace(
            self.planned,
            config=config,
            replaced=self.replaced,
            replaced_by=self._digest(),
            product_errors=dict(self.errors),
        )

    def replaced(self, name: str, dense: Callable[[], Tensor]) -> Tensor | QuantizedWeight:
        """Return a tensor of the directory; dense: makes the checkpoint's tensor."""
        return self.changed[name] if name in self.changed else dense()

    def _digest(self) -> str:
        """Digest of the method, the texts, and the values that distinguish one run's folding and grids from
        another's.
        """
        texts = f"{self.method.name} {self.sequences} {self.changed.digest()}"
        return hashlib.sha256(texts.encode()).hexdigest()
