"""Tensor and pipeline ranks: joining, transport, sums, vocabulary-parallel embedding and head."""
