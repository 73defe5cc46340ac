"""Engines of other machines, reached through Triton's gRPC."""
