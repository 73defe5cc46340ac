"""`python -m tridecode.kernels.explain --preset llama-3-8b --tokens 1,8,64,256`: the GEMMs of a model.

Prints the kernel, tile and split of each product, and why table.py chooses them. Needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tridecode.kernels.bench.shapes import SHAPES
from tridecode.kernels.gemm.plan import Device
from tridecode.kernels.gemm.table import choose

#: one GPU per architecture that the table distinguishes
DEVICES = {
    "h200": Device(90, 132, 232448, (132, 66, 39)),
    "b200": Device(100, 148, 232448),
    "a100": Device(80, 108, 166912),
    "l40s": Device(89, 142, 101376),
    "t4": Device(75, 40, 65536),
}


def lines(preset: str, tokens: list[int], tensor_size: int, device: str) -> Iterator[str]:
    """Yield the lines of the table. Raises ValueError if the ranks cannot share the model's heads."""
    yield f"{preset}, tensor size {tensor_size}, {device}"
    row = "{:8} {:>6} {:>8} {:>7}   {:24} {:>9} {:>5}  {}".format
    yield row("product", "tokens", "outputs", "inputs", "kernel", "tile", "split", "why")
    for name, product in SHAPES[preset].products(tensor_size).items():
        for count in tokens:
            gemm = product._replace(tokens=count)
            plan = choose(gemm, DEVICES[device])
            tile = f"{plan.tile_outputs} x {plan.tile_tokens}" if plan.tile_outputs else "-"
            why = f"norm kernel first; {plan.why}" if gemm.norm and not plan.fuses_norm else plan.why
            yield row(name, count, gemm.outputs, gemm.inputs, plan.kernel, tile, plan.split or "-", why)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tridecode.kernels.explain", description=__doc__)
    parser.add_argument("--preset", required=True, choices=SHAPES)
    parser.add_argument("--tokens", default="1,8,64,256", help="numbers of tokens in a step")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--device", default="h200", choices=DEVICES)
    arguments = parser.parse_args()
    try:
        tokens = [int(part) for part in arguments.tokens.split(",")]
        for line in lines(arguments.preset, tokens, arguments.tp, arguments.device):
            print(line)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
