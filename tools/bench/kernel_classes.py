"""Classifies the kernels of a timeline: a table of our kernels, and name patterns of the libraries' kernels.

tests/tools/bench/test_breakdown.py holds the table against every `__global__` of kernels/csrc.
"""

from __future__ import annotations

GEMM, ATTENTION, COMMUNICATION = "gemm", "attention", "communication"
SAMPLING, OTHER = "sampling", "other"

#: in the order of reports
CLASSES = (GEMM, ATTENTION, COMMUNICATION, SAMPLING, OTHER)

#: kernels of kernels/csrc. A sum over ranks includes bias, residual and norm, and the wait for the others.
OURS = {
    "accept": SAMPLING,
    "activate_rows": OTHER,
    "adapter_sums": OTHER,
    "add_adapters": OTHER,
    "add_copied_rows": COMMUNICATION,
    "add_normed": OTHER,
    "add_normed_any": OTHER,
    "all_reduce_rows": COMMUNICATION,
    "all_reduce_owned_rows": COMMUNICATION,
    "combine_prefill_parts": ATTENTION,
    "decode_attention": ATTENTION,
    "decode_attention_any": ATTENTION,
    "decode_attention_cluster": ATTENTION,
    "decode_attention_wide": ATTENTION,
    "embed": OTHER,
    "embed_int8": OTHER,
    "expand_cache": ATTENTION,
    "expand_rows": GEMM,
    "expand_weight": GEMM,
    "fill_words": OTHER,
    "finish_heads": ATTENTION,
    "gather_columns": GEMM,
    "gather_rows": OTHER,
    "gemm_int4_sm90": GEMM,
    "gemm_int4_stream_k_sm90": GEMM,
    "gemm_library_epilogue": GEMM,
    "gemm_mma": GEMM,
    "gemm_mma_tiles": GEMM,
    "gemm_packed_even_split_sm90": GEMM,
    "gemm_packed_mma": GEMM,
    "gemm_packed_sm90": GEMM,
    "gemm_packed_wide_sm90": GEMM,
    "gemm_sm90_data_parallel": GEMM,
    "gemm_sm90_even_split": GEMM,
    "gemm_sm90_split_k": GEMM,
    "gemm_sm90_stream_k": GEMM,
    "gemv": GEMM,
    "keep_raw": SAMPLING,
    "look_up": OTHER,
    "norm_row": OTHER,
    "norm_row_any": OTHER,
    "place_blocks": OTHER,
    "place_rows": OTHER,
    "prefill_attention": ATTENTION,
    "prefill_attention_any": ATTENTION,
    "prefill_attention_sm90a": ATTENTION,
    "prefill_attention_split": ATTENTION,
    "product_chain_sm90a": GEMM,
    "quantize_row": GEMM,
    "quantize_row_any": GEMM,
    "resolve_tokens": OTHER,
    "rotate_and_cache": ATTENTION,
    "rotate_and_cache_whole": ATTENTION,
    "rotate_and_round": ATTENTION,
    "rotate_and_round_whole": ATTENTION,
    "sample": SAMPLING,
    "soft_cap": OTHER,
    "spread_adapted_rows": OTHER,
    "spread_adapters": OTHER,
    "spread_adapters_norm": OTHER,
    "top_log_probs": SAMPLING,
}
#: beginnings of the names of cuBLAS's kernels and NCCL's
_LIBRARIES = {
    "nccl": COMMUNICATION,
    "nvjet": GEMM,
    "cublas": GEMM,
    "cutlass": GEMM,
    "splitK": GEMM,
    "sm80_xmma": GEMM,
    "sm90_xmma": GEMM,
    "ampere_": GEMM,
    "gemvx": GEMM,
    "gemmk1": GEMM,
}


def plain_name(kernel: str) -> str:
    """Return the bare name from `void space::name<int>(float*)`, without namespaces."""
    return _qualified(kernel).rpartition("::")[2]


def class_of(kernel: str) -> str:
    """Return the class of a kernel or copy by its demangled name; "other": torch's, or unknown."""
    qualified = _qualified(kernel)
    if qualified.startswith("tridecode::"):
        return OURS.get(plain_name(kernel), OTHER)
    found = (kind for start, kind in _LIBRARIES.items() if qualified.startswith(start))
    return next(found, OTHER)


def _qualified(kernel: str) -> str:
    """Return the qualified name, without return type, template arguments and parameters."""
    text = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return text.split("<")[0].split("(")[0].strip()
