"""LoRA adapters added after a GEMM: the operation, its launch on a GPU, and the layout of the matrices."""
