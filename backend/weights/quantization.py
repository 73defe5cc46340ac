"""The quantised (8 or 4 bit) matrices of a weight directory, and the files that hold them. No torch.

In place of `X.weight` there are `X.weight.int8` (or .fp8, .int4), `X.weight.scale` and, if the format has
them, `X.weight.zero` and `X.weight.group`; docs/guides/quantization.md has the bytes.
kernels/formats/quantized.py defines their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tridecode.backend.weights.layout import WeightSpec

#: format -> dtype of its file; int4 has two values in a byte
FILE_DTYPES = {"int8": "int8", "fp8": "fp8", "int4": "uint8"}
ACTIVATIONS = ("int8", "fp8")
#: rows and columns of a block of FP8 checkpoints
BLOCK = 128
#: norms of heads are matrices in some families, but not GEMM operands
_NO_PRODUCTS = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Quantization:
    """The storage format of the matrices of a directory's layers.

    weights: "int8", "fp8" or "int4". group: consecutive inputs that share a scale; 0: all, one scale per
    output. block_rows: outputs that share a scale; BLOCK with a group of BLOCK, else 1. zeros: for int4, each
    group stores the value that represents 0; otherwise it is 8. act_order: the group of each input is stored,
    as by GPTQ. activations: "int8" or "fp8": the rows of a GEMM's input are quantised to it first; "": not
    quantised.
    """

    weights: str
    group: int = 0
    block_rows: int = 1
    zeros: bool = False
    act_order: bool = False
    activations: str = ""

    def covers(self, spec: WeightSpec) -> bool:
        """Return whether this tensor of a model is quantised: a weight matrix of a layer.

        int4 has two outputs in a byte: a matrix whose heads or sections have an odd size keeps its dtype.
        """
        is_product = spec.layer is not None and len(spec.shape) == 2 and spec.name.endswith(".weight")
        if not is_product or spec.name.endswith(_NO_PRODUCTS):
            return False
        if self.weights != "int4":
            return True
        sizes = spec.parts if spec.axis == 1 else spec.shape[1:]
        heads = spec.heads if spec.axis == 1 and spec.heads else (1,) * len(sizes)
        return all(size % (2 * count) == 0 for size, count in zip(sizes, heads))

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def specs(self, spec: WeightSpec) -> list[WeightSpec]:
        """Return the files of a quantised matrix (in, out): values, scale, zero, group."""
        inputs, outputs = spec.shape
        values = replace(spec, name=f"{spec.name}.{self.weights}", dtype=FILE_DTYPES[self.weights])
        if self.weights == "int4":
            sections = tuple(size // 2 for size in spec.sections) if spec.axis == 1 else spec.sections
            values = replace(values, shape=(inputs, outputs // 2), sections=sections, pairs=spec.axis == 1)
        shape = (self.num_groups(inputs), outputs)
        follows_columns = spec.axis == 1 and self.block_rows == 1
        if follows_columns:
            scale = replace(spec, name=f"{spec.name}.scale", shape=shape, dtype="fp32")
        else:
            shape = (shape[0], -(-outputs // self.block_rows))
            scale = WeightSpec(f"{spec.name}.scale", shape, layer=spec.layer, dtype="fp32")
        found = [values, scale]
        if self.zeros:
            found.append(replace(scale, name=f"{spec.name}.zero", dtype="uint8"))
        if self.act_order:
            found.append(WeightSpec(f"{spec.name}.group", (inputs,), layer=spec.layer, dtype="int32"))
        return found


#: formats by their command-line names, with the usual group of int4; values are rounded to nearest
ROUNDED = {
    "int8": Quantization("int8"),
    "fp8": Quantization("fp8"),
    "int4": Quantization("int4", 128, zeros=True),
    "w8a8-int8": Quantization("int8", activations="int8"),
    "w8a8-fp8": Quantization("fp8", activations="fp8"),
    "w8a8-fp8-blocks": Quantization("fp8", BLOCK, BLOCK, activations="fp8"),
}


def stored_specs(specs: Iterable[WeightSpec], quantization: Quantization | None) -> list[WeightSpec]:
    """Return the files of a directory, given the tensors of its model."""
    if quantization is None:
        return list(specs)
    files: list[WeightSpec] = []
    for spec in specs:
        files += quantization.specs(spec) if quantization.covers(spec) else [spec]
    return files
