"""Measures the reuse of common prefixes (`tridecode bench prefix`)."""
