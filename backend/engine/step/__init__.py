"""A step: its plan, the plan's broadcast to other ranks, its buffers and CUDA graphs."""
