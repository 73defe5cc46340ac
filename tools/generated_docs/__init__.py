"""Generates tables of docs/reference from the code that they describe."""
