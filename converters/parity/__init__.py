"""Parity of a converted model with its source: measured, graded, and recorded in PARITY.json."""
