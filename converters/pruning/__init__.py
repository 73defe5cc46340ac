"""Pruned checkpoints: the sizes of each layer, and the zeros of a matrix."""
