"""`python -m tridecode.kernels.bench [operation ...]`: time, rate, share of the roofline,
and the time of cuBLAS or torch."""

from __future__ import annotations

import argparse

from tridecode.kernels.bench.cases import Bench

OPERATIONS = (
    "norm",
    "linear",
    "packed_linear",
    "product_chain",
    "w8a8",
    "two_parts",
    "decode_attention",
    "prefill_attention",
    "sample",
    "step",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tridecode.kernels.bench", description=__doc__)
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], help="default: all")
    bench = Bench()
    for operation in parser.parse_args().operations or OPERATIONS:
        for result in getattr(bench, operation)():
            print(result.line(), flush=True)


if __name__ == "__main__":
    main()
