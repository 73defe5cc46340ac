"""A step: its plan, its way to other ranks, its buffers and CUDA graphs."""
