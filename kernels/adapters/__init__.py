"""LoRA adapters behind products: the operation, its launch on a GPU, and the layout of the matrices."""
