"""Chooses the sequences of each step. Host only, without torch."""
