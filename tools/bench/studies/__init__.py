"""Measurements of one question each, which docs/lab and docs/guides report; each runs with `python -m`."""
