"""`python -m tridecode.kernels.bench [operation ...]`: time, rate, share of the roofline,
and the time of cuBLAS or torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from tridecode.kernels.bench import attention, chains, limited, products, steps
from tridecode.kernels.bench.measure import Result
from tridecode.kernels.bench.rig import Rig

#: each yields results as it measures them
OPERATIONS: dict[str, Callable[[Rig], Iterator[Result]]] = {
    "norm": products.norm,
    "linear": products.linear,
    "packed_linear": products.packed_linear,
    "product_chain": chains.product_chain,
    "w8a8": products.w8a8,
    "two_parts": products.two_parts,
    "decode_attention": attention.decode_attention,
    "prefill_attention": attention.prefill_attention,
    "prefix_attention": attention.prefix_attention,
    "limited_attention": limited.limited_attention,
    "finish_heads": limited.finish_heads,
    "add_normed": limited.add_normed,
    "activate_rows": limited.activate_rows,
    "sample": steps.sample,
    "step": steps.step,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tridecode.kernels.bench", description=__doc__)
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], help="default: all")
    rig = Rig()
    for operation in parser.parse_args().operations or OPERATIONS:
        for result in OPERATIONS[operation](rig):
            print(result.line(), flush=True)


if __name__ == "__main__":
    main()
