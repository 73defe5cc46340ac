"""Tensor and pipeline ranks: joining, transport, sums, a shared vocabulary."""
