"""Benchmarks: the engine alone, a server under load, and other engines on the same shapes."""
