"""Shapes of well-known models, and random weights of these shapes."""
